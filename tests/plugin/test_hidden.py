"""Without the theory plugin, commands that need it print one line, and all others work."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from sparsebench.cli import main
from sparsebench.plugin import registry
from sparsebench.plugin.registry import Registry


@pytest.fixture(autouse=True)
def hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(registry.HIDDEN, "sparsebench_theory")
    monkeypatch.chdir(tmp_path)


def test_its_tasks_models_suites_and_papers_are_gone() -> None:
    registry = Registry(shipped_only=True)
    assert {cls.name for cls in registry.models()} == {"vit", "timm", "hf"}
    assert "theory" not in {cls.name for cls in registry.tasks()} and not registry.suites() and not registry.papers()


def test_one_task_of_a_suite_runs_where_another_is_missing() -> None:
    words = ["run", "attn_topk", "--suite", "quick-scratch", "--dry-run"]
    assert CliRunner().invoke(main, [*words, "--task", "composite"]).exit_code == 0


@pytest.mark.parametrize("suite", ["quick-scratch", "theory-quick"])
def test_a_suite_that_needs_it_says_what_is_missing(suite: str) -> None:
    done = CliRunner().invoke(main, ["run", "attn_topk", "--suite", suite, "--dry-run"])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and "theory" in done.stderr
