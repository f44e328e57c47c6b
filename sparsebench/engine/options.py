"""Which engine a run has, as a user says it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from sparsebench.errors import UserError

if TYPE_CHECKING:
    from sparsebench.engine.dask import Cluster

Engine = Literal["local", "inline", "dask"]


@dataclass(frozen=True)
class Choice:
    """An engine.

    Attributes:
        jobs: worker processes, as asked for; 0 is this process.
        address: of a Dask scheduler.
        cluster: a file that says how one is started.
    """

    engine: Engine
    jobs: int | None
    address: str | None
    cluster: Path | None

    @classmethod
    def given(
        cls, engine: str, address: str | None, cluster: str | os.PathLike[str] | None, jobs: int | None
    ) -> Choice:
        """Return the choice that a user makes.

        Raises:
            UserError: there is no such engine, or something does not go with it.
        """
        if engine not in get_args(Engine):
            raise UserError("--engine", got=f"'{engine}'", allowed=get_args(Engine))
        if engine != "dask" and (address is not None or cluster is not None):
            raise UserError(f"--{'cluster' if address is None else 'address'} needs --engine dask")
        if engine == "dask" and (address is None) == (cluster is None):
            raise UserError("--engine dask", allowed="one of --address tcp://HOST:PORT and --cluster FILE.yaml")
        if engine == "dask" and address is not None and jobs is not None:
            raise UserError("--address: the cluster says how many workers it has", next_step="leave --jobs out")
        if (engine == "dask" and jobs == 0) or (engine == "inline" and jobs):
            raise UserError(f"--engine {engine}", got=f"--jobs {jobs}", next_step="leave --jobs out")
        return cls(
            engine=engine,  # type: ignore[arg-type]
            jobs=0 if engine == "inline" else jobs,
            address=address,
            cluster=None if cluster is None else Path(cluster),
        )

    @property
    def in_processes(self) -> bool:
        """Whether cells are in processes of their own, which can be ended."""
        return self.jobs != 0

    def resolve_device(self, device: str) -> str:
        """Return the device of the workers; see `run.resolve_device`.

        Raises:
            UserError: there is no such device; of a cluster it can be asked for no single GPU.
        """
        if self.engine != "dask":
            from sparsebench.engine.devices import resolve_device

            return resolve_device(device)
        if device not in ("auto", "cpu", "cuda"):
            raise UserError("--device", got=f"'{device}'", allowed="cpu or cuda with --engine dask")
        return "cpu" if device == "auto" else device

    def connected(self, device: str) -> AbstractContextManager[Cluster | None]:
        """Return the cluster to run on, or None for this machine."""
        if self.engine != "dask":
            return nullcontext()
        from sparsebench.engine.dask import connected

        return connected(self.address, self.cluster, self.jobs, device)
