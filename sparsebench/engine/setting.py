"""What an engine is, and what all cells of a run have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from sparsebench.engine.limits import CHECKPOINT, Limits
from sparsebench.engine.stop import Stop
from sparsebench.planning.job import Job
from sparsebench.records.record import Record


class OnBegin(Protocol):
    """Called with the ids of cells that something begins for, or of one and the share of its training that is done.

    Maybe in other threads.
    """

    def __call__(self, cells: Sequence[str], share: float = 0.0, /) -> None:
        """Take note of it."""
        ...


def nobody(cells: Sequence[str], share: float = 0.0, /) -> None:
    """Tell nobody which cells are begun."""


class Setting(BaseModel):
    """What all cells of a run have in common; workers are given it as JSON.

    Attributes:
        out: the run's folder.
        device: "cpu", "cuda" or "cuda:i".
        locations: where the image sets lie, and by their cells trained weights that are not in the run's folder.
        checkpoint: seconds between checkpoints of a cell, 0 for none.
        limits: what a cell may take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    out: Path
    device: str
    locations: dict[str, Path] = {}
    checkpoint: float = CHECKPOINT
    limits: Limits = Limits()


class Engine(Protocol):
    """Runs cells, wherever that is."""

    def records(self, jobs: Sequence[Job], setting: Setting, stop: Stop, on_begin: OnBegin) -> Iterator[Record]:
        """Yield the record of each job as it comes; once a stop is asked for, only of those that are under way.

        Args:
            jobs: in the order in which they are best begun; one is begun when that which it is `after` has its record.
            setting: what they have in common.
            stop: by which the run is asked to end.
            on_begin: called with the ids of cells that are begun.

        Raises:
            UserError: cells cannot be run.
        """
        ...


class RemoteEngine(Engine, Protocol):
    """Runs cells on other machines, which say themselves how many at a time."""

    def slots(self, exclusive: bool = False) -> int:
        """Return how many cells can run at once; with `exclusive` one a machine, or one a GPU."""
        ...
