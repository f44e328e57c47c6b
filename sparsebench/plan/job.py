"""A job: a cell to run, with what its hash does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from sparsebench.plugin.hooks import PROJECT
from sparsebench.records.cell import Cell, Origin
from sparsebench.records.record import Failure, Record, Status
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
        failure: why the strategy could not be loaded, if so: the cell is recorded as failed and not run.
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
    failure: str | None = None
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
