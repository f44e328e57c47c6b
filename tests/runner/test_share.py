"""Which share of a training is done, as a cell reports it."""

from pathlib import Path
from typing import Any

import pytest

from sparsebench.plan.job import Setting
from sparsebench.plugin.registry import Registry
from sparsebench.runner import run_cell
from sparsebench.runner.prepare import Context
from sparsebench.runner.run_cell import run_cells


def reports(job_of: Any, out: Path, task: str) -> list[tuple[str, float]]:
    said: list[tuple[str, float]] = []
    jobs = job_of("dense", task, n_train=8)
    context = Context(Setting(out=out, device="cpu"), on_share=lambda cell_id, done: said.append((cell_id, done)))
    records = list(run_cells(jobs, Registry(), context))
    assert [record.status for record in records] == ["ok"] * len(jobs)
    return said


def test_a_training_of_so_many_steps_says_how_many_are_done(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_cell, "EVERY", 0.0)
    said = reports(job_of, tmp_path, "composite:epochs=2,batch=4,test=10,pretrain_epochs=0")
    shares = [done for _, done in said]
    assert len({cell_id for cell_id, _ in said}) == 1
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_a_training_that_may_end_sooner_says_nothing(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_cell, "EVERY", 0.0)
    assert reports(job_of, tmp_path, "composite:epochs=4,validation=0.25,patience=2,test=10,pretrain_epochs=0") == []
