"""Choices of shipped strategies, and results of their shared helpers, change only with the revisions."""

import copy
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from sparsebench_plugins.tome import ToMe

from sparsebench.strategy import selection
from sparsebench.strategy.plans import Merge

ROOT = Path(__file__).resolve().parents[2]


def load():
    spec = importlib.util.spec_from_file_location("fingerprints", ROOT / ".ci" / "fingerprints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FINGERPRINTS = load()


FEW = ("keep 0.4",)


@pytest.fixture(scope="module")
def kept():
    """Return the rows of the file, with the runs at one budget."""
    rows = FINGERPRINTS.read()
    others = tuple(name for name in FINGERPRINTS.BUDGETS if name not in FEW)
    for row in rows["strategies"].values():
        row["runs"] = {name: run for name, run in row["runs"].items() if not name.endswith(others)}
    return rows


def rows_now(kept, *budgets):
    return FINGERPRINTS.rows_now({name: row["draw"] for name, row in kept["strategies"].items()}, *budgets)


@pytest.fixture(scope="module")
def now(kept):
    return rows_now(kept, FEW)


def test_what_strategies_and_helpers_choose_is_what_the_file_says(kept, now):
    wrong = FINGERPRINTS.stale(kept, now) | FINGERPRINTS.unraised(kept, now)
    assert not wrong, "\n".join(wrong.values())


@pytest.mark.slow
def test_what_they_choose_at_every_budget_is_what_the_file_says():
    kept = FINGERPRINTS.read()
    now = rows_now(kept)
    wrong = FINGERPRINTS.stale(kept, now) | FINGERPRINTS.unraised(kept, now)
    assert not wrong, "\n".join(wrong.values())


def test_every_shared_way_to_choose_has_a_fingerprint():
    shared = [
        f"selection.{name}"
        for name, value in inspect.getmembers(selection, inspect.isfunction)
        if value.__module__ == selection.__name__ and not name.startswith("_")
    ]
    assert shared and set(shared) <= FINGERPRINTS.HELPERS.keys()


def test_a_changed_strategy_is_named_until_its_revision_is_raised(kept, now, monkeypatch):
    """A strategy that chooses otherwise is named until its revision is raised."""

    def plan(self, view, keep):
        target, leaves = selection.bipartite(view.keys, keep, view.prefix_count)
        return Merge(target, weight=torch.where(leaves, 0.0, 1.0))  # merged tokens have weight 0

    monkeypatch.setattr(ToMe, "plan", plan)
    changed = copy.deepcopy(now)
    changed["strategies"]["tome"]["runs"] = FINGERPRINTS.fingerprint(ToMe, kept["strategies"]["tome"]["draw"], 0, FEW)
    wrong = FINGERPRINTS.unraised(kept, changed)
    assert wrong.keys() == {"tome"}
    assert "'tome'" in wrong["tome"] and "revision" in wrong["tome"] and ".ci/fingerprints.py" in wrong["tome"]
    changed["strategies"]["tome"]["revision"] += 1
    assert not FINGERPRINTS.unraised(kept, changed)
    assert FINGERPRINTS.stale(kept, changed).keys() == {"tome"}
    assert not FINGERPRINTS.stale(changed, changed)


def test_a_revision_that_is_raised_alone_has_to_be_in_the_file(kept, now):
    raised = copy.deepcopy(now)
    raised["strategies"]["evit"]["revision"] += 1
    assert not FINGERPRINTS.unraised(kept, raised)
    assert FINGERPRINTS.stale(kept, raised).keys() == {"evit"}
