"""Cells that are run again: which are drawn, whose code runs and where, and what it takes for the badge."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forge import JUDGE, PEEKS, PLUGIN, changed, improve, judged, moved, put, sealed, sourced

from sparsebench.engine import inline
from sparsebench.errors import UserError
from sparsebench.planning.expand import expand
from sparsebench.planning.job import Job
from sparsebench.planning.request import Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.publish import replay as module
from sparsebench.publish.folder import manifest_of
from sparsebench.publish.replay import Here, replay
from sparsebench.publish.verify import Verdict, verify
from sparsebench.records.record import Failure


def replayed(folder: Path, number: int | None = None) -> Verdict:
    verdict = verify(folder)
    replay(folder, verdict, number, Here(Files(), "cpu"))
    return verdict


@pytest.mark.slow
def test_cells_that_are_run_again_here_come_out_the_same(few: Path) -> None:
    verdict = replayed(few)
    assert (verdict.badge, verdict.why, verdict.wrong) == ("replayed", [], False)
    assert "replayed 5 of 5 cells, 1 of its 1 own, with --replay-seed " in verdict.notes[0] and not verdict.notes[1:]


@pytest.mark.slow
def test_of_another_machine_it_is_said_within_how_many_points(few: Path, tmp_path: Path) -> None:
    verdict = replayed(changed(few, tmp_path, moved, None))
    assert verdict.badge == "replayed" and "5 of them are said to come from another machine" in verdict.notes[1]
    assert "agree within 0.00 points" in verdict.notes[1]


@pytest.mark.slow
def test_cells_that_start_from_others_are_run_with_these(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = module._draw
    monkeypatch.setattr(
        module, "_draw", lambda *a: ([r for r in drawn(*a)[0] if r.cell.init and r.label == "norm"][:1], (9, 9))
    )  # fmt: skip
    verdict = replayed(sound)
    assert verdict.badge == "replayed" and "replayed 1 of 9 cells, 1 of its 9 own" in verdict.notes[0]


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_cell_starts_from_is_run_first_through_two_levels(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    task = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"
    registry = Registry()
    jobs = expand(Request(plugins=("dynamic_vit",), tasks=(task,), n_train=(20,), seeds=2), registry)
    chosen = [job for job in jobs if job.label in ("dense", "dynamic_vit", "random") and job.asked]
    records = [job.record_of_failure("ok", Failure(reason="")) for job in chosen if job.cell.repetition][::order]
    handed: list[Job] = []
    manifest: Any = SimpleNamespace(strategy="dynamic_vit")
    monkeypatch.setattr(module.runs, "carry_out", lambda plan, *arguments: handed.extend(plan.todo))
    module._run(records, manifest, registry, None, Here(Files(), "cpu"))
    assert [job.label for job in handed[:2]] == ["dense", "dense"] and len(handed) == 4
    first, dense, *rest = handed
    assert first.cell.task.name == "plain" and first.keep_weights and dense.keep_weights
    assert [first.after, dense.after] == ["", first.cell.id] and not any(job.keep_weights for job in rest)
    assert {job.label: job.after for job in rest} == {"dynamic_vit": dense.cell.id, "random": first.cell.id}


def test_so_many_are_drawn_and_with_a_seed_the_same(sound: Path) -> None:
    def draw(number: int | None, seed: int) -> list[str]:
        return [record.cell_id for record in module._draw(sound, "norm", number, seed)[0]]

    every, (total, own) = module._draw(sound, "norm", None, 1)
    mine = {record.cell_id for record in every if record.label == "norm"}
    assert len(every) == total and len(mine) == own > 1
    assert draw(2, 1) == draw(2, 1) and len(draw(2, 1)) == 2
    assert len({tuple(draw(4, seed)) for seed in range(20)}) > 1
    for seed in range(20):
        assert len(mine & set(draw(1, seed))) == 1 and len(mine & set(draw(4, seed))) >= 2
        assert len({r.cell.task.name for r in module._draw(sound, "norm", 4, seed)[0] if r.label == "norm"}) == 2
    assert set(draw(10_000, 1)) == {record.cell_id for record in every}


def test_no_content_of_the_records_moves_the_draw(sound: Path, tmp_path: Path) -> None:
    """Whoever forges can try seconds until cells are drawn that are sound, if the draw hangs on them."""
    folder = changed(sound, tmp_path, put(1e6, "seconds"), None)
    for seed in range(5):
        ids = [[r.cell_id for r in module._draw(each, "norm", 1, seed)[0]] for each in (sound, folder)]
        assert ids[0] == ids[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (JUDGE + PLUGIN.read_text(), "other outcomes here, on the same machine"),  # what compares never imports it
        (PLUGIN.read_text().replace("(1 if", "(-1 if"), "other outcomes here, on the same machine"),
        (PLUGIN.read_text().replace("view):", f"view):{PEEKS}"), "does not conform: check "),
        (PLUGIN.read_text() + "\nraise SystemExit(0)\n", ""),
    ],
    ids=["replaces the judge", "another strategy", "reads the answers", "leaves"],
)
def test_a_file_that_does_not_give_these_numbers_is_not_replayed(
    few: Path, tmp_path: Path, text: str, said: str
) -> None:
    folder = sourced(few, tmp_path, text, lambda raw: improve(raw, 10))
    badge, out = judged(folder, "--replay", "all", "--yes", "--device", "cpu")
    assert badge == "reported" and said in out, out


def test_a_file_that_is_not_the_one_that_was_run_is_not_run(few: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(few, tmp_path / "copy"))
    (folder / "plugin" / "good.py").write_text(PLUGIN.read_text().replace("(1 if", "(2 if"))
    with pytest.raises(UserError, match="the file of 'norm' is not the one that was run"):
        replayed(sealed(folder))


def test_an_installed_strategy_is_to_be_installed_as_it_was_run(few: Path, tmp_path: Path) -> None:
    folder = changed(few, tmp_path, lambda raw: None)
    manifest = manifest_of(folder)
    origin = manifest.plugin.model_copy(update={"plugin": "far", "distribution": "far-away", "version": "2.0"})
    folder = sealed(changed(folder, tmp_path / "far", put(origin.model_dump(), "origin")), plugin=origin, file="")
    with pytest.raises(UserError, match=r"'norm' is not here as it was run; got none.* far-away 2\.0; install"):
        replayed(folder)


def test_a_strategy_of_another_kind_than_its_record_says_is_not_run(job_of: Any, tmp_path: Path) -> None:
    (job,) = job_of(str(PLUGIN), "theory:steps=10,test=20,tokens=20", n_train=4)
    (record,) = inline([job.model_copy(update={"kind": "oracle"})], Registry(), tmp_path, "cpu", {})
    assert record.failure is not None and record.failure.reason == "'norm' is deployable here, and oracle in its job"


def test_what_is_rejected_is_not_run(few: Path, tmp_path: Path) -> None:
    verdict = replayed(changed(few, tmp_path, put(0.999, "metrics", "accuracy", "value")))
    assert verdict.badge == "rejected" and not verdict.notes
