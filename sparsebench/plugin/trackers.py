"""Records as TensorBoard event files and as MLflow runs."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparsebench import hookimpl
from sparsebench.files import check_writable
from sparsebench.plugin.observer import Observer, See, missing_library
from sparsebench.records.record import Part, Record, canonical

if TYPE_CHECKING:
    from mlflow import MlflowClient


STEPS, SERIES = "watched_steps", "watched_"
CELL = "sparsebench.cell"
"""The tag of an MLflow run with the id of its cell."""


def slug(text: str) -> str:
    """Return at most 80 letters, digits, dots, dashes and underscores that resemble the text."""
    return re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII)[:80].strip(".") or "_"


def key(text: str) -> str:
    """Return the text if it is a slug, otherwise its slug with a hash of the text, so that keys of texts differ."""
    plain = slug(text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def experiment(record: Record) -> str:
    """Return task-model, the name of the experiment; cells of one experiment are compared."""
    return f"{key(record.cell.task.name)}-{key(record.cell.model.name)}"


def title(record: Record) -> str:
    """Return the readable name of the cell within its experiment."""
    cell = record.cell
    where = "" if cell.where == "both" else f", {cell.where} only"
    return f"{record.label}, {cell.budget.label}{where}, {cell.n_train} samples, repetition {cell.repetition}"


def parameters(record: Record) -> dict[str, bool | int | float | str]:
    """Return the cell as a flat dictionary: strategy, strategy.power, budget.macs, ...; `init` is the id of a cell."""
    cell = record.cell
    flat: dict[str, Any] = {"label": record.label, "kind": record.kind, "status": record.status}
    for name in ("task", "model", "strategy"):
        part: Part = getattr(cell, name)
        flat |= {name: part.name} | {f"{name}.{parameter}": value for parameter, value in part.params.items()}
    flat |= {f"budget.{parameter}": value for parameter, value in cell.budget.model_dump(mode="json").items()}
    flat |= {"n_train": cell.n_train, "where": cell.where, "repetition": cell.repetition}
    flat["init"] = cell.init.id if cell.init else None
    return {
        key(name): value if isinstance(value, bool | int | float | str) else canonical(value)
        for name, value in flat.items()
        if value is not None
    }


def metrics(record: Record) -> dict[str, float]:
    """Return the value of each metric that has one."""
    return {key(name): float(metric.value) for name, metric in record.metrics.items() if metric.value is not None}


def series(record: Record) -> Iterator[tuple[str, int, float]]:
    """Yield name, step and value of the quantities that were recorded during training."""
    steps = record.samples.get(STEPS, ())
    for name, values in record.samples.items():
        if name.startswith(SERIES) and name != STEPS:
            for step, value in zip(steps, values, strict=True):
                if step is not None and value is not None:
                    yield key(name), int(step), value


class TensorBoard(Observer):
    """Writes event files: one folder for each cell, with metrics, hyper-parameters and training curves.

    Attributes:
        dir: the log folder; OUT/tensorboard by default.
    """

    name: ClassVar[str] = "tensorboard"

    dir: str = ""

    def open(self, out: Path) -> See:
        """Return the function that writes a record to DIR/task-model/strategy...cell_id, replacing an earlier one."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise missing_library(self.name) from error
        return partial(_write, check_writable(Path(self.dir) if self.dir else out / "tensorboard"))


def _write(root: Path, record: Record) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = root / experiment(record) / f"{slug(title(record))}.{record.cell_id}"
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        writer.add_hparams(parameters(record), metrics(record), run_name=".")
        for name, step, value in series(record):
            writer.add_scalar(name, value, step)
        if record.failure:
            writer.add_text("failure", record.failure.reason)


class MLflow(Observer):
    """Writes MLflow runs: one experiment for each task and model, one run for each cell.

    Attributes:
        uri: a folder, or any tracking URI that the installed MLflow takes; the folder OUT/mlruns by default.
    """

    name: ClassVar[str] = "mlflow"

    uri: str = ""

    def open(self, out: Path) -> See:
        """Return the function that writes a record as a run, and replaces an earlier run of its cell."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing_library(self.name) from error
        uri = self.uri
        if "://" not in uri and not uri.startswith("file:"):
            uri = check_writable(Path(uri) if uri else out / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            # MLflow 3.7 and later need this for folders; databases need more packages.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(tracking_uri=uri)
        return partial(_log, client, lru_cache(maxsize=None)(partial(_experiment, client)))


def _log(client: MlflowClient, experiment_of: Callable[[str], tuple[str, dict[str, str]]], record: Record) -> None:
    """Write a run, then delete the cell's earlier run, if any; MLflow truncates long values."""
    from mlflow.entities import Metric, Param

    id_, runs = experiment_of(experiment(record))
    started = datetime.fromisoformat(record.started).timestamp() if record.started else time.time()
    begun = round(1000 * started)
    tags = {
        "cell": record.cell_id,
        "status": record.status,
        "device": record.device,
        "plugin": record.origin.plugin,
        "plugin_revision": record.origin.revision,
        "environment": record.environment,
        **({"failure": record.failure.reason} if record.failure else {}),
    }
    tags = {f"sparsebench.{name}": text for name, text in tags.items()}
    run = client.create_run(id_, begun, tags, title(record)).info.run_id
    values = [Metric(name, value, begun, 0) for name, value in metrics(record).items()]
    values += [Metric(name, value, begun, step) for name, step, value in series(record)]
    client.log_batch(run, values, [Param(name, str(value)) for name, value in parameters(record).items()])
    ended = "FINISHED" if record.status in ("ok", "unsupported", "skipped") else "FAILED"
    client.set_terminated(run, ended, begun + round(1000 * record.seconds))
    if (old := runs.get(record.cell_id)) is not None:
        client.delete_run(old)
    runs[record.cell_id] = run


def _experiment(client: MlflowClient, name: str) -> tuple[str, dict[str, str]]:
    """Return the id of an experiment, which is created if missing, and its runs by cell id."""
    experiment = client.get_experiment_by_name(name)
    id_ = experiment.experiment_id if experiment else client.create_experiment(name)
    runs = client.search_runs([id_], max_results=50_000)
    return id_, {run.data.tags[CELL]: run.info.run_id for run in runs if CELL in run.data.tags}


@hookimpl
def sparsebench_observers() -> list[type[Observer]]:
    """See `Hooks`."""
    return [TensorBoard, MLflow]
