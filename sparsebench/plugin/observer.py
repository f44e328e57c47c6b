"""What an observer is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError

if TYPE_CHECKING:
    from sparsebench.records.record import Record

See = Callable[["Record"], None]


class Observer(BaseModel):
    """Receives each record that a run has stored. Subclass it, name it, and write `open`.

    Fields of the class are its parameters, as for a strategy.

    Attributes:
        name: the name for --observe.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    name: ClassVar[str]

    def open(self, out: Path) -> See:
        """Return the function that is called with each record, in the process that stores them.

        If a cell is run again, its record comes again, with the same `cell_id`. If the function raises an exception,
        there is one warning, and the function is not called again.

        Args:
            out: the run's folder.

        Raises:
            UserError: the observer cannot be turned on; no cell has been run.
        """
        raise NotImplementedError(f"observer '{self.name}' has no method `open`")


def usable(folder: Path, name: str) -> Path:
    """Return the folder, made if it was not there; UserError unless files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"observer '{name}' cannot write to {str(folder)[:200]!r}: {reason}") from error


def not_installed(name: str) -> UserError:
    """Return the error for a shipped observer without its library."""
    return UserError(f"observer '{name}' is not installed", next_step=f"pip install 'sparsebench[{name}]'")
