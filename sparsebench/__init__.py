"""sparsebench: a benchmark suite for token sparsification in Vision Transformers.

import sparsebench
table = sparsebench.run(["attn_topk"], out="results")       # a DataFrame, one row for each strategy and budget
records = sparsebench.load_records("results")
table = sparsebench.leaderboard(records)
sparse = sparsebench.apply(model, "tome:per_block=13")      # your timm model with a strategy
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.plugin.hooks import hookimpl
from sparsebench.plugin.observer import Observer
from sparsebench.strategy.base import How, Kind, LossInputs, ModelOutputs, Published, Site, Strategy
from sparsebench.strategy.budget import Convention, Schedule
from sparsebench.strategy.plans import Disposal, Keep, Mask, Merge, Mix, Place, Plan, Rest, Shift
from sparsebench.strategy.view import FrozenNetwork, Images, TokenView

if TYPE_CHECKING:
    from sparsebench.api import leaderboard, load_records, run, show_tokens
    from sparsebench.deploy.apply import apply
    from sparsebench.measure.cost import CostModel
    from sparsebench.models.base import Model, Network
    from sparsebench.tasks.base import Data, Recipe, Split, Task

_LATER = {
    "CostModel": "measure.cost",
    "Data": "tasks.base",
    "Model": "models.base",
    "Network": "models.base",
    "Recipe": "tasks.base",
    "Split": "tasks.base",
    "Task": "tasks.base",
    "apply": "deploy.apply",
    "leaderboard": "api",
    "load_records": "api",
    "run": "api",
    "show_tokens": "api",
}
"""Public names whose modules are slow to import, with their modules. Writing a strategy needs none of them."""

__all__ = [
    "Convention",
    "CostModel",
    "Data",
    "Disposal",
    "FrozenNetwork",
    "How",
    "Images",
    "Keep",
    "Kind",
    "LossInputs",
    "Mask",
    "Merge",
    "Mix",
    "Model",
    "ModelOutputs",
    "Network",
    "Observer",
    "Place",
    "Plan",
    "Published",
    "Recipe",
    "Rest",
    "Schedule",
    "Shift",
    "Site",
    "Split",
    "Strategy",
    "StrategyError",
    "Task",
    "TokenView",
    "UnsupportedError",
    "UserError",
    "__version__",
    "apply",
    "hookimpl",
    "leaderboard",
    "load_records",
    "run",
    "show_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sparsebench' has no attribute '{name}'")
    return getattr(import_module(f"sparsebench.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
