"""Records written as TensorBoard event files and as MLflow runs are read back."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sparsebench.plugin.observer import Observer
from sparsebench.plugin.trackers import MLflow, TensorBoard, key
from sparsebench.records.record import Record

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
Make = Callable[..., Record]


class Found(NamedTuple):
    """One run, read by its library: parameters, last values of metrics, a series by steps, and a failure."""

    name: str
    parameters: dict[str, Any]
    metrics: dict[str, float]
    loss: list[tuple[int, float]]
    failure: str
    whole: Any


def from_tensorboard(folder: Path) -> list[Found]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    runs = []
    for run in sorted({path.parent for path in (folder / "composite-vit").rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(run), {"scalars": 0, "tensors": 0})
        events.Reload()
        scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        info = HParamsPluginData.FromString(events.PluginTagToContent("hparams")["_hparams_/session_start_info"])
        hparams = info.session_start_info.hparams
        failure = "failure/text_summary"
        reason = events.Tensors(failure)[0].tensor_proto.string_val[0] if failure in events.Tags()["tensors"] else b""
        runs.append(Found(
            run.name, {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()},
            {name: values[-1][1] for name, values in scalars.items()}, scalars.get("watched_loss", []), reason.decode(),
            None,
        ))  # fmt: skip
    return runs


def from_mlflow(folder: Path) -> list[Found]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    (experiment,) = (entry for entry in client.search_experiments() if entry.name == "composite-vit")
    runs = []
    for run in client.search_runs([experiment.experiment_id], max_results=5000):
        loss = client.get_metric_history(run.info.run_id, "watched_loss")
        reason = run.data.tags.get("sparsebench.failure", "")
        series = [(metric.step, metric.value) for metric in loss]
        runs.append(Found(run.info.run_name, run.data.params, run.data.metrics, series, reason, run))
    return runs


@pytest.fixture(params=["tensorboard", "mlflow"])
def tracker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[type[Any], str, Callable[[Path], list[Found]], Callable[[Any], Any]]:
    """Return an observer, its folder parameter, a function that reads the folder, and one that converts values."""
    pytest.importorskip(request.param, reason=f"needs the extra: pip install 'sparsebench[{request.param}]'")
    if request.param == "tensorboard":
        return TensorBoard, "dir", from_tensorboard, lambda value: value
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so that the observer's change is undone
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    return MLflow, "uri", from_mlflow, str


def test_metrics_series_and_parameters_are_read_back(make_record: Make, tmp_path: Path, tracker: Any) -> None:
    record, (cls, _, read, as_read) = make_record(), tracker
    cls().open(tmp_path)(record)
    (place,) = tmp_path.iterdir()
    assert place.name == {"tensorboard": "tensorboard", "mlflow": "mlruns"}[cls.name]
    (run,) = read(place)
    assert "mine_mine_macs_0.5" in run.name or run.name == "mine(mine), macs 0.5, 8 samples, repetition 0"
    assert run.metrics == {"accuracy": 0.75, "watched_loss": pytest.approx(1 / 11)}
    assert run.loss == [(0, 1.0), (10, pytest.approx(1 / 11))]
    assert run.parameters == {name: as_read(value) for name, value in {
        "task": "composite", "task.name": "inner", "task.widths": "[1,2]", "task.lr": 0.5, "model": "vit",
        "strategy": "mine", "strategy.on": True, "strategy.word": "mine", "budget.macs": 0.5, "n_train": 8,
        "budget.convention": record.cell.budget.convention, "where": "both", "repetition": 0, "label": "mine(mine)",
        "kind": "deployable", "status": "ok",
    }.items()}  # fmt: skip
    if run.whole:
        assert run.whole.info.status == "FINISHED" and run.whole.info.end_time - run.whole.info.start_time == 2500
        assert run.whole.data.tags["sparsebench.cell"] == record.cell_id


@pytest.mark.parametrize(
    ("status", "ended"),
    [("oom", "FAILED"), ("crashed", "FAILED"), ("unsupported", "FINISHED"), ("skipped", "FINISHED")],
)
def test_a_cell_without_a_result_says_why(
    make_record: Make, tmp_path: Path, tracker: Any, status: str, ended: str
) -> None:
    cls, place, read, _ = tracker
    cls(**{place: str(tmp_path / "log")}).open(tmp_path)(make_record(status))
    (run,) = read(tmp_path / "log")
    assert (run.parameters["status"], run.failure, run.metrics) == (status, "it broke: mine", {})
    assert run.whole is None or run.whole.info.status == ended


def test_a_cell_that_is_told_again_takes_its_own_place(make_record: Make, tmp_path: Path, tracker: Any) -> None:
    cls, place, read, _ = tracker
    observer: Observer = cls(**{place: str(tmp_path / "log")})
    observer.open(tmp_path)(make_record(accuracy=0.25))
    see = observer.open(tmp_path)
    for record in (make_record(accuracy=0.5), make_record(accuracy=0.75), make_record(repetition=1, accuracy=1.0)):
        see(record)
    assert sorted(run.metrics["accuracy"] for run in read(tmp_path / "log")) == [0.75, 1.0]


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_hostile_names_stay_in_the_folder(
    make_record: Make, tmp_path: Path, tracker: Any, strange: str, status: str
) -> None:
    (cls, place, read, _), folder = tracker, tmp_path / "a b#%20é"
    cls(**{place: str(folder)}).open(tmp_path)(make_record(status, strange=strange))
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    (run,) = read(folder)
    assert run.parameters["strategy.word"] in (strange, strange[:6000])
    good = {"accuracy": 0.75, key(strange): 0.5, "watched_loss": pytest.approx(1 / 11)}
    assert run.metrics == (good if status == "ok" else {})
    assert run.whole is not None or len(os.fsencode(run.name)) < 200


def test_a_long_series_is_written_in_parts(make_record: Make, tmp_path: Path, tracker: Any) -> None:
    cls, place, read, _ = tracker
    cls(**{place: str(tmp_path / "log")}).open(tmp_path)(make_record(n_samples=2502))
    (run,) = read(tmp_path / "log")
    assert sorted(step for step, _ in run.loss) == [10 * i for i in range(2501)]


def test_mlflow_sends_nothing_home(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs the extra: pip install 'sparsebench[mlflow]'")
    program = f"""
from pathlib import Path
from sparsebench.plugin.trackers import MLflow
MLflow().open(Path({str(tmp_path)!r}))
from mlflow.telemetry.utils import is_telemetry_disabled
print(is_telemetry_disabled())
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW") and key != "DO_NOT_TRACK"}
    line = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=clean)
    assert done.stdout.splitlines() == ["True"], done.stderr
