"""Dask workers as jobs of a batch system: SLURM, PBS, LSF, ..."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError, unknown

TRIES = 3
"""Workers that may be lost with a cell."""
SYSTEMS = {
    "slurm": "SLURMCluster", "pbs": "PBSCluster", "sge": "SGECluster", "lsf": "LSFCluster", "oar": "OARCluster",
    "moab": "MoabCluster", "htcondor": "HTCondorCluster", "local": "LocalCluster",
}  # fmt: skip
"""dask-jobqueue's classes; "local" runs the job's script on this machine, to try a file out."""


@contextmanager
def start(file: Path, workers: int | None) -> Iterator[Any]:
    """Start a scheduler here that has jobs submitted; they are ended with it.

    Args:
        file: dask-jobqueue's own configuration, of one system.
        workers: how many Dask workers; as many as one job has unless told otherwise.

    Raises:
        UserError: the extra is not installed, or the file is wrong.
    """
    name, options = read(file)
    try:
        import dask
        import dask_jobqueue.local
    except ImportError as error:
        raise UserError("dask-jobqueue is not installed", next_step="pip install 'sparsebench[cluster]'") from error
    scheduler = {"dashboard_address": ":0"} | (options.pop("scheduler_options", None) or {})  # any port that is free
    module = dask_jobqueue.local if name == "local" else dask_jobqueue
    try:
        with dask.config.set({"distributed.scheduler.allowed-failures": TRIES - 1}):
            cluster = getattr(module, SYSTEMS[name])(scheduler_options=scheduler, **options)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{file}: {' '.join(str(error).split())[:300]}") from error
    with cluster:
        cluster.scale(workers) if workers else cluster.scale(jobs=1)
        yield cluster


def read(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the batch system that a file names and its options, by the names of Python arguments.

    The file is YAML: `jobqueue:`, below it one system, below that its options.
    """
    try:
        import yaml
    except ImportError as error:
        raise UserError("Dask is not installed", next_step="pip install 'sparsebench[cluster]'") from error
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cluster file {file} cannot be read: {' '.join(str(error).split())}") from error
    systems = settings.get("jobqueue") if isinstance(settings, dict) and len(settings) == 1 else None
    if not isinstance(systems, dict) or len(systems) != 1:
        raise UserError(f"cluster file {file}", allowed="dask-jobqueue's: jobqueue: SYSTEM: OPTION: VALUE, one system")
    ((name, options),) = systems.items()
    if name not in SYSTEMS:
        raise unknown(f"batch system in {file}", str(name), SYSTEMS)
    if not isinstance(options, dict):
        raise UserError(f"cluster file {file}: '{name}' has no options", allowed="cores and memory at least")
    return name, {str(key).replace("-", "_"): value for key, value in options.items()}
