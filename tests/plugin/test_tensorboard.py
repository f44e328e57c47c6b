import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsebench.plugin.trackers import TensorBoard, key
from sparsebench.records.record import Record

pytest.importorskip("tensorboard", reason="needs the extra: pip install 'sparsebench[tensorboard]'")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

Make = Callable[..., Record]


def read(folder: Path) -> EventAccumulator:
    """Return all that the one run below the folder has."""
    (run,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    found = EventAccumulator(str(run), {"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(found: EventAccumulator) -> dict[str, list[tuple[int, float]]]:
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def parameters(found: EventAccumulator) -> dict[str, Any]:
    """Return the hyper-parameters."""
    held = HParamsPluginData.FromString(found.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    given = held.session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in given.items()}


def test_metrics_series_and_hyper_parameters_are_read_back(make_record: Make, tmp_path: Path) -> None:
    record = make_record()
    TensorBoard().open(tmp_path)(record)
    (run,) = (tmp_path / "tensorboard" / "composite-vit").iterdir()
    assert run.name.endswith(record.cell_id) and run.name.startswith("mine_mine_macs_0.5")
    found = read(tmp_path / "tensorboard")
    assert scalars(found) == {
        "accuracy": [(0, 0.75)], "watched_loss": [(0, 1.0), (10, pytest.approx(1 / 11))],
    }  # fmt: skip
    assert parameters(found) == {
        "task": "composite", "task.name": "inner", "task.widths": "[1,2]", "task.lr": 0.5, "model": "vit",
        "strategy": "mine", "strategy.on": True, "strategy.word": "mine", "budget.macs": 0.5, "n_train": 8.0,
        "budget.convention": record.cell.budget.convention, "where": "both", "repetition": 0.0, "label": "mine(mine)",
        "kind": "deployable", "status": "ok",
    }  # fmt: skip


def test_a_failed_cell_is_a_run_that_says_so(make_record: Make, tmp_path: Path) -> None:
    TensorBoard().open(tmp_path)(make_record("oom"))
    found = read(tmp_path)
    assert parameters(found)["status"] == "oom" and scalars(found) == {}
    (event,) = found.Tensors("failure/text_summary")
    assert event.tensor_proto.string_val == [b"it broke: mine"]


def test_a_cell_that_is_told_again_takes_its_own_place(make_record: Make, tmp_path: Path) -> None:
    TensorBoard().open(tmp_path)(make_record(accuracy=0.25))
    see = TensorBoard().open(tmp_path)
    see(make_record(accuracy=0.5))
    see(make_record(accuracy=0.75))
    assert scalars(read(tmp_path))["accuracy"] == [(0, 0.75)]
    see(make_record(repetition=1))
    assert len({path.parent for path in tmp_path.rglob("events.out.tfevents.*")}) == 2


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_hostile_names_stay_in_the_folder(make_record: Make, tmp_path: Path, strange: str, status: str) -> None:
    record = make_record(status, strange=strange)
    folder = tmp_path / "deep" / "log"
    TensorBoard(dir=str(folder)).open(tmp_path)(record)
    (run,) = (folder / "composite-vit").iterdir()
    assert run.name.endswith(record.cell_id) and len(os.fsencode(run.name)) < 200
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert parameters(read(folder))["strategy.word"] == strange
    assert status != "ok" or scalars(read(folder))[key(strange)] == [(0, 0.5)]
