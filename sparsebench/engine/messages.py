"""What a run and its worker say to each other."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from sparsebench.planning.job import Job
from sparsebench.records.record import Record


class Question(BaseModel):
    """What a run gives to a worker: cells, those of a batch may be trained in one program."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: tuple[Job, ...]


class Message(BaseModel):
    """One line. With nothing in it: the worker has loaded and waits for cells.

    Attributes:
        at: ids of the cells that the worker begins something with; several are trained in one program.
        share: of the training of that one cell that is done; 0 where none is yet, or its end may come sooner.
        record: of one of the cells it was given.
        unfit: why it must take no further cell, those it still has included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: tuple[str, ...] = ()
    share: float = 0.0
    record: Record | None = None
    unfit: str = ""
