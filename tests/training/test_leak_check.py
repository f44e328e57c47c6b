"""Strategies that know labels or masks, or change their view, fail: some items are watched, and tested again."""

import gc
from pathlib import Path
from typing import Any

import pytest
from measured import what_was_measured
from running import inline

from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.runner import run_cell
from sparsebench.runner.prepare import Prepared
from sparsebench.runner.run_cell import Result, measure
from sparsebench.training import evaluation, steps

PLUGIN = """
import gc, sys
from typing import ClassVar
import torch, sparsebench

SEEN = []

def up(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back

def samples_in(frames):
    for frame in frames:
        samples = frame.f_locals.get("samples")
        if samples is not None and hasattr(samples, "relevance"):
            rows = frame.f_locals.get("rows")
            return samples.relevance if rows is None else samples.relevance[rows]

class Leak(sparsebench.Strategy):
    name: ClassVar[str] = "leak"

    def scores(self, view):
        found = None
        {how}
        if found is None or found.shape != view.index.shape:
            return view.tokens.sum(dim=-1)
        return found

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Leak]
"""
WAYS = {
    "frames": "found = samples_in(up(sys._getframe()))",
    "objects": (
        "rows = view.index.shape; "
        "every = [x for x in gc.get_objects() if type(x).__name__ == 'Samples' and x.relevance is not None]; "
        "same = [x.relevance for x in every if x.relevance.shape == rows]; "
        "found = same[-1] if same else None"
    ),
}


def record_of(job_of: Any, tmp_path: Path, source: str, **options: Any) -> Record:
    path = tmp_path / "leak.py"
    path.write_text(source)
    jobs = job_of(str(path), n_train=4, **options)
    gc.collect()  # removes samples of earlier cells
    return list(inline(jobs, Registry(), tmp_path / "out"))[-1]


FOUND = "with labels and masks of other samples it kept other tokens of "
CAUGHT = {name: (how, FOUND) for name, how in WAYS.items()}
CAUGHT["changes its view"] = "view.tokens.mul_(2)", "changed in place: view.tokens"


@pytest.mark.parametrize(("how", "said"), CAUGHT.values(), ids=CAUGHT)
def test_a_strategy_that_finds_the_mask_or_changes_its_view_has_no_result(
    job_of: Any, tmp_path: Path, how: str, said: str
) -> None:
    record = record_of(job_of, tmp_path, PLUGIN.replace("{how}", how))
    assert record.status == "failed" and record.failure is not None and record.outcomes is None
    assert record.failure.reason.startswith(said)


def test_a_plugin_that_answers_with_the_labels_has_no_result(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps.Samples, "begin", steps.Samples.begin)  # both are restored
    monkeypatch.setattr(evaluation, "outputs_of", evaluation.outputs_of)
    cheat = (
        "from sparsebench.training import evaluation, steps; "
        "begin, outputs = steps.Samples.begin, evaluation.outputs_of; "
        "steps.Samples.begin = lambda self, actor, rows, **more: "
        "SEEN.append(self.labels[rows]) or begin(self, actor, rows, **more); "
        "evaluation.outputs_of = lambda *given: outputs(*given) * 0 + torch.eye(10)[SEEN[-1]]"
    )
    record = record_of(job_of, tmp_path, PLUGIN.replace("{how}", cheat))
    assert record.status == "failed" and record.failure is not None
    assert "had another prediction" in record.failure.reason


@pytest.mark.parametrize("plugin", ["oracle", "anti_oracle", "random", "attn_topk", "dense"])
def test_oracles_and_honest_strategies_are_as_ever(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str
) -> None:
    def run() -> dict[str, Any]:
        (record,) = inline(job_of(plugin, n_train=4), Registry(), tmp_path)
        assert record.status == "ok"
        return what_was_measured(record)

    watched = run()
    monkeypatch.setattr(run_cell, "measure", lambda *args, leaks, **more: measure(*args, leaks=False, **more))
    assert run() == watched


def test_a_run_looks_once_at_each_strategy_and_again_at_one_that_cheated(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def watched(result: Result, cell: Prepared, *args: Any, leaks: bool, **more: Any) -> None:
        checked.extend([cell.cell.strategy.name] * leaks)
        measure(result, cell, *args, leaks=leaks, **more)

    monkeypatch.setattr(run_cell, "measure", watched)

    def run(plugin: str) -> list[str]:
        jobs = [job_of(plugin, n_train=4, repetition=repetition)[-1] for repetition in (0, 1)]
        checked.clear()
        return [record.status for record in inline(jobs, Registry(), tmp_path / "out")]

    assert run("attn_topk") == ["ok", "ok"] and checked == ["attn_topk"]
    (tmp_path / "leak.py").write_text(PLUGIN.replace("{how}", WAYS["frames"]))
    assert run(str(tmp_path / "leak.py")) == ["failed", "failed"] and checked == ["leak", "leak"]
