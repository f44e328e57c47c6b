"""A job: a cell to run, with what its hash does not know, and what all cells of a run have in common."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.plan.request import How
from sparsebench.plugin.hooks import PROJECT
from sparsebench.records import store
from sparsebench.records.record import Cell, Failure, Origin, Record, Status
from sparsebench.records.table import setting_text
from sparsebench.strategy.base import Kind


class Job(BaseModel):
    """A cell to run.

    Attributes:
        origin: where its strategy comes from.
        kind: the strategy's kind.
        label: what tables call it: its name, with the parameters that are not its defaults.
        files: the plugin files that bring its strategy, task or model: what a worker loads for it.
        strangers: the plugins whose code it runs and that do not come with sparsebench: names of installed ones, paths
            of files. No other cells have a worker with them.
        after: id of the cell that must be done before, or "".
        network: id of the cell whose trained network this one tests, or "" where it trains its own.
        asked: whether the cell is one of the request; else it is there only because others start from it.
        keep_weights: whether its weights are kept: others start from them, or they are looked at.
        together: whether several like it may be trained in one program, where that is faster.
        cost: about the MACs of its training and its test, without a strategy; see `expand.cost_of`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cell: Cell
    origin: Origin
    kind: Kind
    label: str
    files: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    after: str = ""
    network: str = ""
    asked: bool = True
    keep_weights: bool = False
    together: bool = False
    cost: float = 1.0

    @property
    def code(self) -> tuple[str, ...]:
        """The third-party code that it runs: of a strategy that does not come with sparsebench, it and no other."""
        shipped = not self.files and self.origin.distribution == PROJECT
        return self.strangers if shipped or not self.strangers else (*self.strangers, self.cell.strategy.name)

    @cached_property
    def alike(self) -> tuple[str, bool, int]:
        """What it has in common with those that take as long for what they cost.

        That is its task and model with all their parameters, whether it only tests a network, and the training samples.
        """
        return setting_text(self.cell), bool(self.network), 0 if self.network else self.cell.n_train

    def __copy__(self) -> Job:
        copy = super().__copy__()
        copy.__dict__.pop("alike", None)  # `model_copy` goes on to change what it is made of
        return copy

    @property
    def weights(self) -> str:
        """Id of the cell whose trained weights it is tested with."""
        return self.network or self.cell.id

    @property
    def order(self) -> tuple[bool, int]:
        """Rises in the order in which jobs are begun: those that others start from first, as they start from others."""
        return not self.keep_weights, len(self.cell.inits) if self.keep_weights else 0

    def record_of_failure(self, status: Status, failure: Failure, started: str = "", seconds: float = 0.0) -> Record:
        """Return a record that says why there is no result."""
        return Record(
            cell=self.cell, cell_id=self.cell.id, status=status, failure=failure, origin=self.origin, kind=self.kind,
            label=self.label, started=started, seconds=round(seconds, 3),
        )  # fmt: skip


TIMEOUT = 6 * 3600.0
"""Seconds that a cell may take unless told otherwise: many times what any cell of the suites here does, and a strategy
that hangs costs a worker's night rather than the run."""
GIB = 2**30
LEAST_MEMORY = GIB // 2
"""Bytes; a worker that has loaded the libraries has most of it."""

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": GIB,
          "tib": 2**40, "k": 2**10, "m": 2**20, "g": GIB, "t": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a cell may take before it is killed; 0 is without limit.

    Attributes:
        timeout: seconds.
        memory: bytes, of a worker and all that it has started, the libraries included.
        exclusive: whether it has its machine, or its GPU, for itself; see `turn`.
    """

    timeout: float = TIMEOUT
    memory: int = 0
    exclusive: bool = False

    @classmethod
    def parse(
        cls, timeout: float | str | None, memory: float | str | None, workers: int, exclusive: bool = False
    ) -> Limits:
        """Return the limits that a user asks for; None leaves the default.

        Raises:
            UserError: no such limit, or there is no worker process, which alone can be killed.
        """
        for option, asked in (("--timeout", timeout), ("--memory-limit", memory)):
            if asked is not None and not workers:
                raise UserError(
                    f"{option} needs a worker process: only that can be killed", next_step="give --jobs 1 or more"
                )
        seconds = TIMEOUT if timeout is None else _number("--timeout", timeout, _SECONDS, "30, 10m, 1.5h, 0 for none")
        size = _number("--memory-limit", 0 if memory is None else memory, _BYTES, "4GiB, 800MB, 0 for none")
        if 0 < size < LEAST_MEMORY:
            raise UserError("--memory-limit", got=str(memory), allowed=f"{shown_size(LEAST_MEMORY)} or more, or 0")
        if size and sys.platform != "linux":
            raise UserError("--memory-limit: only Linux says what processes take", next_step="leave it out")
        return cls(seconds, int(size), exclusive)


def _number(option: str, asked: float | str, units: dict[str, int], allowed: str) -> float:
    """Return a number with its unit as a number of seconds or bytes."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(asked).strip().lower(), re.ASCII)
    if match is None or match[2] not in units or not math.isfinite(number := float(match[1]) * units[match[2]]):
        raise UserError(option, got=f"'{asked}'", allowed=allowed)
    return number


def shown_size(size: float) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.2f} GiB"


def shown_time(seconds: float) -> str:
    """Return a number of seconds for people."""
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


class Setting(BaseModel):
    """What all cells of a run have in common.

    Attributes:
        out: the run's folder.
        device: "cpu", "cuda" or "cuda:i".
        locations: where the image sets lie, and by their cells trained weights that are not in the run's folder.
        checkpoint: seconds between checkpoints of a cell, 0 for none.
        limits: what a cell may take.
        batch: how many test images are tried at a time; None for `evaluate.first_batch`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: Path
    device: str
    locations: dict[str, Path] = {}
    checkpoint: float = How.checkpoint
    limits: Limits = Limits()
    batch: int | None = None

    def weights(self, cell_id: str) -> Path:
        """Return the file of a cell's trained weights."""
        return self.locations.get(cell_id) or store.weights_path(self.out, cell_id)
