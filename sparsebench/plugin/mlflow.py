"""Records as MLflow runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sparsebench import hookimpl
from sparsebench.plugin import naming
from sparsebench.plugin.observer import Observer, See, not_installed, usable

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from sparsebench.records.record import Record

T = TypeVar("T")
CELL = "sparsebench.cell"
MOST_METRICS, MOST_PARAMS = 1000, 100
"""What one request may hold."""
MOST_PARAM, MOST_TAG = 6000, 5000
"""Characters of a value."""


class MLflow(Observer):
    """Writes MLflow runs: one experiment for each task and model, one run for each cell.

    Attributes:
        uri: a folder, or any tracking URI that the installed MLflow takes; the folder OUT/mlruns unless given.
    """

    name: ClassVar[str] = "mlflow"

    uri: str = ""

    def open(self, out: Path) -> See:
        """Return what writes the run of a record, in place of one that was there."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # is read when mlflow is imported
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise not_installed(self.name) from error
        uri = self.uri
        if "://" not in uri and not uri.startswith("file:"):
            uri = usable(Path(uri) if uri else out / "mlruns", self.name).resolve().as_uri()
        if uri.startswith("file:"):
            # MLflow 3.7 and later use folders only if told so; databases need more packages
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return _Runs(MlflowClient(tracking_uri=uri)).write


class _Runs:
    """The runs of a tracking store, by cell."""

    def __init__(self, client: MlflowClient):
        self.client = client
        self.experiments: dict[str, tuple[str, dict[str, str]]] = {}

    def write(self, record: Record) -> None:
        """Write a run, then delete the one that the cell had."""
        from mlflow.entities import Metric, Param

        experiment, runs = self._experiment(naming.experiment(record))
        begun = _milliseconds(record.started)
        tags = {CELL: record.cell_id, **_tags(record)}
        run = self.client.create_run(experiment, begun, tags, naming.title(record)[:MOST_TAG]).info.run_id
        params = [Param(name, str(value)[:MOST_PARAM]) for name, value in naming.parameters(record).items()]
        metrics = [Metric(name, value, begun, 0) for name, value in naming.metrics(record).items()]
        metrics += [Metric(name, value, begun, step) for name, step, value in naming.series(record)]
        for batch in _parts(params, MOST_PARAMS):
            self.client.log_batch(run, params=batch)
        for part in _parts(metrics, MOST_METRICS):
            self.client.log_batch(run, metrics=part)
        ended = "FINISHED" if record.status in ("ok", "unsupported", "skipped") else "FAILED"
        self.client.set_terminated(run, ended, begun + round(1000 * record.seconds))
        if (old := runs.get(record.cell_id)) is not None:
            self.client.delete_run(old)
        runs[record.cell_id] = run

    def _experiment(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the id of an experiment, made if it was not there, and its runs by cell."""
        if name not in self.experiments:
            known = self.client.get_experiment_by_name(name)
            id_ = known.experiment_id if known else self.client.create_experiment(name)
            self.experiments[name] = id_, dict(self._runs_of(id_))
        return self.experiments[name]

    def _runs_of(self, experiment: str) -> list[tuple[str, str]]:
        stored: list[tuple[str, str]] = []
        token: Any = None
        while True:
            page = self.client.search_runs([experiment], page_token=token)
            stored += [(run.data.tags[CELL], run.info.run_id) for run in page if CELL in run.data.tags]
            if not (token := page.token):
                return stored


def _tags(record: Record) -> dict[str, str]:
    tags = {"status": record.status, "device": record.device, "plugin": record.origin.plugin}
    tags |= {"plugin_revision": record.origin.revision, "environment": record.environment}
    if record.failure:
        tags["failure"] = record.failure.reason
    return {f"sparsebench.{name}": text[:MOST_TAG] for name, text in tags.items()}


def _milliseconds(started: str) -> int:
    """Return a record's time of start since 1970, or now where it has none."""
    return round(1000 * (datetime.fromisoformat(started).timestamp() if started else time.time()))


def _parts(things: Sequence[T], most: int) -> list[Sequence[T]]:
    return [things[start : start + most] for start in range(0, len(things), most)]


@hookimpl
def sparsebench_observers() -> list[type[Observer]]:
    """See `Hooks`."""
    return [MLflow]
