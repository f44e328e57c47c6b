import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsebench.plugin.trackers import MLflow, key
from sparsebench.records.record import Record

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # is read when mlflow is imported
pytest.importorskip("mlflow", reason="needs the extra: pip install 'sparsebench[mlflow]'")
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

Make = Callable[..., Record]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what the observer sets."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    yield


def read(folder: Path, view: int = ViewType.ACTIVE_ONLY) -> tuple[MlflowClient, list[Run]]:
    client = MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("composite-vit")
    return client, list(client.search_runs([experiment.experiment_id], run_view_type=view, max_results=5000))


def test_metrics_series_and_parameters_are_read_back(make_record: Make, tmp_path: Path) -> None:
    record = make_record()
    MLflow().open(tmp_path)(record)
    client, (run,) = read(tmp_path / "mlruns")
    assert run.info.status == "FINISHED" and run.info.run_name == "mine(mine), macs 0.5, 8 samples, repetition 0"
    assert run.info.end_time - run.info.start_time == 2500
    assert run.data.metrics["accuracy"] == 0.75 and set(run.data.metrics) == {"accuracy", "watched_loss"}
    history = client.get_metric_history(run.info.run_id, "watched_loss")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (10, 1 / 11)]
    assert run.data.tags["sparsebench.cell"] == record.cell_id and run.data.tags["sparsebench.status"] == "ok"
    assert run.data.params == {
        "task": "composite", "task.name": "inner", "task.widths": "[1,2]", "task.lr": "0.5", "model": "vit",
        "strategy": "mine", "strategy.on": "True", "strategy.word": "mine", "budget.macs": "0.5", "n_train": "8",
        "budget.convention": record.cell.budget.convention, "where": "both", "repetition": "0", "label": "mine(mine)",
        "kind": "deployable", "status": "ok",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "ended"),
    [("oom", "FAILED"), ("crashed", "FAILED"), ("unsupported", "FINISHED"), ("skipped", "FINISHED")],
)
def test_a_cell_without_a_result_says_why(make_record: Make, tmp_path: Path, status: str, ended: str) -> None:
    MLflow().open(tmp_path)(make_record(status))
    _, (run,) = read(tmp_path / "mlruns")
    assert (run.info.status, run.data.tags["sparsebench.status"]) == (ended, status)
    assert run.data.tags["sparsebench.failure"] == "it broke: mine" and run.data.metrics == {}


def test_a_cell_that_is_told_again_takes_its_own_place(make_record: Make, tmp_path: Path) -> None:
    MLflow().open(tmp_path)(make_record(accuracy=0.25))
    see = MLflow().open(tmp_path)
    see(make_record(accuracy=0.5))
    see(make_record(accuracy=0.75))
    see(make_record(repetition=1, accuracy=1.0))
    _, runs = read(tmp_path / "mlruns")
    assert sorted(run.data.metrics["accuracy"] for run in runs) == [0.75, 1.0]
    assert len(read(tmp_path / "mlruns", ViewType.ALL)[1]) == 4


def test_a_long_series_is_written_in_parts(make_record: Make, tmp_path: Path) -> None:
    MLflow().open(tmp_path)(make_record(n_samples=2502))
    client, (run,) = read(tmp_path / "mlruns")
    history = client.get_metric_history(run.info.run_id, "watched_loss")
    assert sorted(metric.step for metric in history) == [10 * i for i in range(2501)]


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_hostile_names_are_written(make_record: Make, tmp_path: Path, strange: str, status: str) -> None:
    MLflow(uri=str(tmp_path / "a b#%20é")).open(tmp_path)(make_record(status, strange=strange))
    assert [path.name for path in tmp_path.iterdir()] == ["a b#%20é"]
    _, (run,) = read(tmp_path / "a b#%20é")
    assert run.data.params["strategy.word"] == strange[:6000]
    assert run.data.metrics == ({"accuracy": 0.75, key(strange): 0.5, "watched_loss": 1 / 11} if status == "ok" else {})


def test_the_library_sends_nothing_home(tmp_path: Path) -> None:
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
