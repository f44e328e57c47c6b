"""What a run and its worker say to each other."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, TypeAdapter

from sparsebench.planning.job import Job
from sparsebench.records.record import Record

JOBS = TypeAdapter(list[Job])
"""What a run gives to a worker: one line of JSON."""


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
