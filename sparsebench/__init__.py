"""sparsebench: a benchmark suite for token sparsification in Vision Transformers.

import sparsebench
table = sparsebench.run(["attn_topk"], out="results")       # a DataFrame, one row a strategy and budget
records = sparsebench.load_records("results")
table = sparsebench.leaderboard(records)
"""

from sparsebench.api import leaderboard, load_records, run
from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.plans import Keep, Merge, Mix, Plan
from sparsebench.plugin.hooks import hookimpl
from sparsebench.strategy import Disposal, Kind, Schedule, Site, Strategy
from sparsebench.view import TokenView

__version__ = "0.1.0"

__all__ = [
    "Disposal",
    "Keep",
    "Kind",
    "Merge",
    "Mix",
    "Plan",
    "Schedule",
    "Site",
    "Strategy",
    "StrategyError",
    "TokenView",
    "UnsupportedError",
    "UserError",
    "hookimpl",
    "leaderboard",
    "load_records",
    "run",
]
