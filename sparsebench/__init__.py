"""sparsebench: a benchmark suite for token sparsification in Vision Transformers.

import sparsebench
table = sparsebench.run(["attn_topk"], out="results")       # a DataFrame, one row a strategy and budget
records = sparsebench.load_records("results")
table = sparsebench.leaderboard(records)
"""

from sparsebench.api import leaderboard, load_records, run
from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.observe.base import Observer
from sparsebench.plans import Keep, Mask, Merge, Mix, Plan, Shift
from sparsebench.plugin.hooks import hookimpl
from sparsebench.strategy import (
    Convention,
    Disposal,
    How,
    Kind,
    Lesson,
    Place,
    Published,
    Schedule,
    Site,
    Strategy,
    Told,
)
from sparsebench.view import TokenView

__version__ = "0.1.0"

__all__ = [
    "Convention",
    "Disposal",
    "How",
    "Keep",
    "Kind",
    "Lesson",
    "Mask",
    "Merge",
    "Mix",
    "Observer",
    "Place",
    "Plan",
    "Published",
    "Schedule",
    "Shift",
    "Site",
    "Strategy",
    "StrategyError",
    "TokenView",
    "Told",
    "UnsupportedError",
    "UserError",
    "hookimpl",
    "leaderboard",
    "load_records",
    "run",
]
