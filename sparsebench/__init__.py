"""sparsebench: a benchmark suite for token sparsification in Vision Transformers.

import sparsebench
table = sparsebench.run(["attn_topk"], out="results")       # a DataFrame, one row a strategy and budget
records = sparsebench.load_records("results")
table = sparsebench.leaderboard(records)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsebench.api import leaderboard, load_records, run
from sparsebench.disposal import Disposal
from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.hooks import hookimpl
from sparsebench.observer import Observer
from sparsebench.plans import Keep, Mask, Merge, Mix, Place, Plan, Shift
from sparsebench.strategy import Convention, How, Kind, Lesson, Published, Schedule, Site, Strategy, Told
from sparsebench.version import __version__
from sparsebench.view import TokenView

if TYPE_CHECKING:
    from sparsebench.measure.cost import CostModel
    from sparsebench.models.base import Model, Network
    from sparsebench.tasks.base import Data, Recipe, Split, Task

_LATER = {
    "CostModel": "measure.cost", "Model": "models.base", "Network": "models.base", "Data": "tasks.base",
    "Recipe": "tasks.base", "Split": "tasks.base", "Task": "tasks.base",
}  # fmt: skip
"""Public names whose modules import NumPy, and where they are; a strategy needs none of them."""

__all__ = [
    "Convention",
    "CostModel",
    "Data",
    "Disposal",
    "How",
    "Keep",
    "Kind",
    "Lesson",
    "Mask",
    "Merge",
    "Mix",
    "Model",
    "Network",
    "Observer",
    "Place",
    "Plan",
    "Published",
    "Recipe",
    "Schedule",
    "Shift",
    "Site",
    "Split",
    "Strategy",
    "StrategyError",
    "Task",
    "TokenView",
    "Told",
    "UnsupportedError",
    "UserError",
    "__version__",
    "hookimpl",
    "leaderboard",
    "load_records",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sparsebench' has no attribute '{name}'")
    return getattr(import_module(f"sparsebench.{_LATER[name]}"), name)
