"""The checkpoint of a cell: its training, so far, on the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sparsebench.errors import UserError
from sparsebench.records import files
from sparsebench.training.loop import Training
from sparsebench.training.state import resume, state_of

log = logging.getLogger(__name__)


class Checkpoint:
    """Called after each step, writes the state of a training every few seconds.

    Args:
        path: the file, which is there whole or not at all.
        made_by: what its use depends on: a file that says otherwise is not used.
        every: seconds between writings.
        training: what it is of.

    Attributes:
        resumed: how often the training was gone on with.
    """

    def __init__(self, path: Path, made_by: Mapping[str, str], every: float, training: Training):
        self.path, self.made_by, self.every, self.training = path, made_by, every, training
        self.resumed = 0
        self.warned = False
        self.due = time.monotonic() + every

    def resume(self) -> None:
        """Go on from the file, if it is there and fits."""
        try:
            with safe_open(self.path, "pt") as file:
                written = file.metadata() or {}
                if other := [name for name, value in self.made_by.items() if written.get(name) != value]:
                    raise ValueError(f"it was made with another {other[0]}")
                names = file.keys()
                state = {name: file.get_tensor(name).clone() for name in names}
            resume(self.training, state)
        except FileNotFoundError:
            return
        except (OSError, SafetensorError, ValueError) as error:
            log.warning("%s is not used and its cell starts anew: %s", self.path.name, error)
            return
        self.resumed = int(written["resumed"]) + 1

    def __call__(self, step: int) -> None:
        """Write, if it is time to and training is not over."""
        if time.monotonic() >= self.due and not self.training.course.finished:
            self.write()
            self.due = time.monotonic() + self.every

    def write(self) -> None:
        """Write the file; where that fails, say so once and let the training go on."""
        state = {name: x.to("cpu", copy=True).contiguous() for name, x in state_of(self.training).items()}
        try:
            files.write_whole(self.path, save(state, {**self.made_by, "resumed": str(self.resumed)}))
        except UserError as error:
            if not self.warned:
                log.warning("no checkpoint: %s", error)
            self.warned = True
