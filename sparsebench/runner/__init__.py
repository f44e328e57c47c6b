"""Engines map cells to records: in this process, or in worker processes of this machine."""

from sparsebench.runner.engines import Engine, InProcess, Processes, Setting, Stop, inline, local
from sparsebench.runner.limits import CHECKPOINT, Limits
from sparsebench.runner.queue import most_together

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
