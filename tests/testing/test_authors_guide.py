"""The examples of docs/authors.md are run, and what it says of names is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparsebench
from sparsebench.records.origin import Origin
from sparsebench.strategy import SITES, Strategy
from sparsebench.testing import run
from sparsebench.view import NEEDS, TokenView

PAGE = Path(__file__).resolve().parents[2] / "docs" / "authors.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def strategy_in(code):
    """Return the strategy that the code defines."""
    names: dict = {"__name__": __name__}
    exec(code, names)
    (cls,) = (x for x in names.values() if isinstance(x, type) and issubclass(x, Strategy) and x is not Strategy)
    return cls(), names


@pytest.mark.parametrize("code", CODE[:5], ids=["far_out", "neighbours", "gate", "half", "lonely"])
def test_the_strategies_of_the_page_conform(code):
    strategy, names = strategy_in(code)
    assert names.get("sparsebench_strategies", lambda: [type(strategy)])() == [type(strategy)]
    outcomes = list(run.outcomes(strategy, run.blank(strategy, Origin(plugin="page"))))
    bad = [(o.check, o.message) for o in outcomes if o.status not in ("passed", "unsupported")]
    assert [check for check, _ in bad] == ["pickles_by_reference"], bad  # they live in no module


def test_the_test_of_the_page_collects_its_checks(tmp_path):
    (tmp_path / "far_out.py").write_text(CODE[0])
    (tmp_path / "test_far_out.py").write_text(CODE[5])
    line = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", "plans_are_legal"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_the_page_names_every_field_site_and_declaration():
    text = PAGE.read_text()
    fields = {name for name in vars(TokenView) if not name.startswith("_")} | NEEDS
    declared = {name for name in Strategy.__class_vars__ if name != "model_config"}
    for name in (*fields, *SITES, *declared):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


def test_the_observer_of_the_page_writes_a_line_a_record(tmp_path):
    (tmp_path / "lines.py").write_text(CODE[6])
    request = {"tasks": "theory:steps=10,test=10,tokens=20", "n_train": [4], "seeds": 1, "jobs": 0, "device": "cpu"}
    sparsebench.run(observe=f"{tmp_path}/lines.py:file=log.txt", out=tmp_path / "out", **request)
    records = sparsebench.load_records(tmp_path / "out")
    lines = sorted((tmp_path / "out" / "log.txt").read_text().splitlines())
    assert [line.split()[:3] for line in lines] == records[["cell_id", "strategy", "status"]].values.tolist()
    assert [float(line.split()[3]) for line in lines] == records["accuracy"].tolist()


def test_all_code_of_the_page_is_run():
    assert len(CODE) == 7
