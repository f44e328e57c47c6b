"""Engines map cells to records: in this process, or in worker processes of this machine."""

from sparsebench.engine.in_process import InProcess, inline
from sparsebench.engine.limits import CHECKPOINT, Limits
from sparsebench.engine.processes import Processes, local
from sparsebench.engine.queue import most_together
from sparsebench.engine.setting import Engine, Setting
from sparsebench.engine.stop import Stop

__all__ = [
    "CHECKPOINT",
    "Engine",
    "InProcess",
    "Limits",
    "Processes",
    "Setting",
    "Stop",
    "inline",
    "local",
    "most_together",
]
