"""Engines map cells to records: in this process, or in worker processes of this machine."""

from sparsebench.engine.in_process import inline
from sparsebench.engine.limits import CHECKPOINT, Limits
from sparsebench.engine.processes import local
from sparsebench.engine.queue import most_together
from sparsebench.engine.stop import Stop

__all__ = ["CHECKPOINT", "Limits", "Stop", "inline", "local", "most_together"]
