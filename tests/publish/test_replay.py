import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forging import PLUGIN, Tamper, sealed

from sparsebench import api
from sparsebench.engine import inline
from sparsebench.errors import UserError
from sparsebench.measure.scores import Items, scores
from sparsebench.planning.expand import expand
from sparsebench.planning.job import Job
from sparsebench.planning.request import Files, Request
from sparsebench.plugin.content import file_revision
from sparsebench.plugin.registry import Registry
from sparsebench.publish import replay as module
from sparsebench.publish.folder import MANIFEST, RECORDS
from sparsebench.publish.replay import Here, replay
from sparsebench.publish.submit import submit
from sparsebench.publish.verify import Verdict, verify
from sparsebench.records.cell import canonical
from sparsebench.records.record import Failure, pack, unpack, unpack_reals


def replayed(folder: Path, number: int | None = 100, plugin: Path | None = PLUGIN) -> Verdict:
    verdict = verify(folder)
    replay(folder, verdict, number, Here(plugin, Files(), "cpu"))
    return verdict


@pytest.fixture(scope="module")
def few(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a submission of few cells, without pictures."""
    out = tmp_path_factory.mktemp("few")
    api.run(str(PLUGIN), suite=str(suite), tasks="theory", seeds=1, out=out / "out", jobs=0, device="cpu")
    return submit(out / "out", out / "submissions").folder


@pytest.mark.slow
def test_cells_that_are_run_again_here_have_the_same_outcomes_to_the_bit(few: Path) -> None:
    verdict = replayed(few)
    assert (verdict.badge, verdict.why, verdict.wrong) == ("replayed", [], False)
    assert "replayed 4 of 4 cells, 1 of its 1 own, with --replay-seed " in verdict.notes[0]


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
    module._run(records, manifest, registry, Here(None, Files(), "cpu"))
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
        assert len(mine & set(draw(1, seed))) == 1
        assert len(mine & set(draw(4, seed))) >= 2
        two = {record.cell.task.name for record in module._draw(sound, "norm", 4, seed)[0] if record.label == "norm"}
        assert len(two) == min(2, len({record.cell.task.name for record in every if record.label == "norm"}))
    assert set(draw(10_000, 1)) == {record.cell_id for record in every}


def test_no_content_of_the_records_moves_the_draw(few: Path, tmp_path: Path) -> None:
    """Whoever forges can try seconds until cells are drawn that are sound, if the draw hangs on them."""
    folder = shutil.copytree(few, tmp_path / "copy")
    drawn = [[r.cell_id for r in module._draw(few, "norm", 1, seed)[0]] for seed in range(5)]
    lines = [json.loads(line) for line in (folder / RECORDS).read_bytes().splitlines()]
    for raw in lines:
        raw["seconds"] += 1.0
    (folder / RECORDS).write_bytes(b"".join(canonical(raw).encode() + b"\n" for raw in lines))
    assert [[r.cell_id for r in module._draw(folder, "norm", 1, seed)[0]] for seed in range(5)] == drawn


def test_what_compares_never_runs_the_plugin(few: Path, tmp_path: Path) -> None:
    """A plugin that replaces what compares is not imported there, and the forgery is found all the same."""
    evil = tmp_path / "good.py"
    patch = 'import sys\nreplay = sys.modules.get("sparsebench.publish.replay")\n'
    patch += "if replay:\n    replay.agree.compare = lambda *a: None\n    raise SystemExit(0)\n"
    evil.write_text(patch + PLUGIN.read_text())
    revision = file_revision(evil)
    manifest = module.folders.manifest_of(few)
    source = manifest.plugin.model_copy(update={"revision": revision})
    before = module.agree.compare
    registry = Registry(shipped_only=True)
    module._check_source(manifest.model_copy(update={"plugin": source}), registry, evil)
    (record,), _ = module._draw(few, "norm", 1, 1)
    job = module._job(record, manifest.model_copy(update={"plugin": source}), registry, evil)
    assert job.files == (str(evil),) and job.strangers and job.origin.revision == revision
    assert module.agree.compare is before and "norm" not in registry._strategies


def test_a_strategy_of_another_kind_than_its_record_says_is_not_run(few: Path, job_of: Any, tmp_path: Path) -> None:
    (job,) = job_of(str(PLUGIN), "theory:steps=10,test=20,tokens=20", n_train=4)
    (record,) = inline([job.model_copy(update={"kind": "oracle"})], Registry(), tmp_path, "cpu", {})
    assert record.failure is not None and record.failure.reason == "'norm' is deployable here, and oracle in its job"


@pytest.mark.slow
def test_a_forgery_that_agrees_with_itself_is_found(few: Path, tmp_path: Path) -> None:
    """All is right from the first record to the last but that nothing of it happened."""
    folder = shutil.copytree(few, tmp_path / "copy")
    lines = [json.loads(line) for line in (folder / RECORDS).read_bytes().splitlines()]
    for raw in lines:
        if raw["label"] == "norm":
            _forge(raw)
    (folder / RECORDS).write_bytes(b"".join(canonical(raw).encode() + b"\n" for raw in lines))
    assert verify(sealed(folder)).badge == "recounted"
    verdict = replayed(folder)
    assert (verdict.badge, verdict.wrong) == ("recounted", True)
    assert len(verdict.why) == 1 and "other outcomes here, on the same machine" in verdict.why[0]


def _forge(raw: dict[str, Any]) -> None:
    """Make one wrong prediction right, and all that is measured with it."""
    outcomes, n = raw["outcomes"], raw["outcomes"]["n"]
    arrays = [unpack(outcomes[name], n).copy() for name in ("predicted", "label", "group", "rank")]
    predicted, labels, groups, ranks = arrays
    item = int(np.flatnonzero(predicted != labels)[0])
    predicted[item], ranks[item] = labels[item], 0
    outcomes |= {"predicted": pack(predicted), "rank": pack(ranks)}
    items = Items(predicted, labels, groups, ranks, unpack_reals(outcomes["loss"], n))
    names = ["-1 without spurious", "-1 with spurious", "+1 without spurious", "+1 with spurious"]
    sizes = [int(raw["metrics"][f"train_samples: {name}"]["value"]) for name in names]
    for name, *own in scores(items, 2, names, sizes):
        raw["metrics"][name] = dict(zip(("value", "unit", "n", "low", "high", "method"), own, strict=True))


def test_a_changed_plugin_is_found_by_its_revision(few: Path, tmp_path: Path) -> None:
    other = tmp_path / "good.py"
    other.write_text(PLUGIN.read_text() + "\nCHANGED = 1\n")
    with pytest.raises(UserError, match=r"revision of 'norm' is not the published one.*--plugin FILE.py"):
        replayed(few, plugin=other)
    with pytest.raises(UserError, match="came from a file; give that with --plugin"):
        replayed(few, plugin=None)


def test_a_record_that_names_another_revision_is_not_replayed(tampered: Tamper) -> None:
    def claim(raw: dict[str, Any]) -> None:
        raw["origin"]["revision"] = "0" * 64

    verdict = replayed(tampered(claim))
    assert verdict.badge == "rejected" and not verdict.notes[1:]


def test_a_manifest_that_names_another_revision_is_rejected(few: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(few, tmp_path / "copy")
    text = (folder / MANIFEST).read_text()
    revision = json.loads(text)["plugin"]["revision"]
    (folder / MANIFEST).write_text(text.replace(revision, "code-" + "0" * 16))
    assert "what its strategy is" in verify(folder).why[0]
