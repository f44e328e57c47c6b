"""The environment of a run: what all its cells have in common, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparsebench.plan.request import Execution
from sparsebench.records import store


@dataclass(frozen=True)
class RunEnvironment:
    """The environment of a run. It is sent to each worker.

    Attributes:
        out: the run's folder.
        device: "cpu", "cuda" or "cuda:i".
        locations: the places of pictures by name, and of trained weights outside the run's folder by cell id.
        execution: how cells are run.
    """

    out: Path
    device: str
    locations: Mapping[str, Path] = field(default_factory=dict)
    execution: Execution = field(default_factory=Execution)

    def weights(self, cell_id: str) -> Path:
        """Return the file of a cell's trained weights."""
        return self.locations.get(cell_id) or store.weights_path(self.out, cell_id)
