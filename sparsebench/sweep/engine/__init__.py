"""Engines map cells to records: in this process, or in worker processes of this machine."""

from sparsebench.sweep.engine.here import inline
from sparsebench.sweep.engine.limits import CHECKPOINT, Limits
from sparsebench.sweep.engine.queue import most_together
from sparsebench.sweep.engine.stop import Stop
from sparsebench.sweep.engine.workers import local

__all__ = ["CHECKPOINT", "Limits", "Stop", "inline", "local", "most_together"]
