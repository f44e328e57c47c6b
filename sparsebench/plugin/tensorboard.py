"""Records as TensorBoard event files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sparsebench import hookimpl
from sparsebench.plugin import naming
from sparsebench.plugin.observer import Observer, See, not_installed, usable

if TYPE_CHECKING:
    from sparsebench.records.record import Record


class TensorBoard(Observer):
    """Writes event files: one folder for each cell, with metrics, hyper-parameters and training curves.

    Attributes:
        dir: the log folder; OUT/tensorboard unless given.
    """

    name: ClassVar[str] = "tensorboard"

    dir: str = ""

    def open(self, out: Path) -> See:
        """Return what writes DIR/task-model/strategy...cell_id of a record, in place of what was there."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise not_installed(self.name) from error
        return partial(_write, usable(Path(self.dir) if self.dir else out / "tensorboard", self.name))


def _write(root: Path, record: Record) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = root / naming.experiment(record) / f"{naming.slug(naming.title(record))}.{record.cell_id}"
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        writer.add_hparams(naming.parameters(record), naming.metrics(record), run_name=".")
        for name, step, value in naming.series(record):
            writer.add_scalar(name, value, step)
        if record.failure:
            writer.add_text("failure", record.failure.reason)


@hookimpl
def sparsebench_observers() -> list[type[Observer]]:
    """See `Hooks`."""
    return [TensorBoard]
