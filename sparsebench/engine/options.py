"""Which engine a run has, as a user says it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol, get_args

from sparsebench.engine import devices
from sparsebench.engine.queue import Seconds
from sparsebench.engine.setting import RemoteEngine
from sparsebench.errors import UserError
from sparsebench.planning.request import EngineName, How

GROUP = "sparsebench.engines"
"""The entry points of engines on other machines: each a function like `Connect`."""


class Connect(Protocol):
    """Makes the connection of an engine on other machines."""

    def __call__(
        self, address: str | None, file: Path | None, workers: int | None, device: str, seconds: Seconds
    ) -> AbstractContextManager[RemoteEngine]:
        """Return a connection to the scheduler at an address, or to one that is started as a file says."""


@dataclass(frozen=True)
class Choice:
    """An engine.

    Attributes:
        device: "cpu", "cuda" or "cuda:i", of the workers.
        jobs: worker processes, as asked for; 0 is this process.
        address: of a Dask scheduler.
        cluster: a file that says how one is started.
    """

    engine: EngineName
    device: str
    jobs: int | None
    address: str | None
    cluster: Path | None

    @classmethod
    def of(cls, how: How) -> Choice:
        """Return the choice that a user makes.

        Raises:
            UserError: there is no such engine, something does not go with it, or there is no such device.
        """
        engine, jobs = how.engine, how.jobs
        if engine not in get_args(EngineName):
            raise UserError("--engine", got=f"'{engine}'", allowed=get_args(EngineName))
        if engine != "dask" and (how.address is not None or how.cluster is not None):
            raise UserError(f"--{'cluster' if how.address is None else 'address'} needs --engine dask")
        if engine == "dask" and (how.address is None) == (how.cluster is None):
            raise UserError("--engine dask", allowed="one of --address tcp://HOST:PORT and --cluster FILE.yaml")
        if engine == "dask" and how.address is not None and jobs is not None:
            raise UserError("--address: the cluster says how many workers it has", next_step="leave --jobs out")
        if (engine == "dask" and jobs == 0) or (engine == "inline" and jobs):
            raise UserError(f"--engine {engine}", got=f"--jobs {jobs}", next_step="leave --jobs out")
        device = _device_of_a_cluster(how.device) if engine == "dask" else devices.resolve_device(how.device)
        return cls(engine, device, 0 if engine == "inline" else jobs, how.address, how.cluster)

    @property
    def in_processes(self) -> bool:
        """Whether cells are in processes of their own, which can be ended."""
        return self.jobs != 0

    def connect(self, seconds: Seconds) -> AbstractContextManager[RemoteEngine | None]:
        """Return the cluster to run on, or None for this machine; `seconds` is what each job is expected to take."""
        if self.engine != "dask":
            return nullcontext()
        entries = metadata.entry_points(group=GROUP, name=self.engine)
        if not entries:
            raise UserError(f"--engine {self.engine} is not installed", next_step="install sparsebench again")
        connect: Connect = next(iter(entries)).load()
        return connect(self.address, self.cluster, self.jobs, self.device, seconds)


def _device_of_a_cluster(device: str) -> str:
    """Return the device of a cluster's workers, which can be asked for no single GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise UserError("--device", got=f"'{device}'", allowed="cpu or cuda with --engine dask")
    return "cpu" if device == "auto" else device
