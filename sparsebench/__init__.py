"""sparsebench: a benchmark suite for token sparsification in Vision Transformers.

import sparsebench
table = sparsebench.run(["attn_topk"], out="results")       # a DataFrame, one row a strategy and budget
records = sparsebench.load_records("results")
table = sparsebench.leaderboard(records)
"""

from sparsebench.api import leaderboard, load_records, run
from sparsebench.disposal import Disposal
from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.observer import Observer
from sparsebench.plans import Keep, Mask, Merge, Mix, Place, Plan, Shift
from sparsebench.plugin.hooks import hookimpl
from sparsebench.strategy import Convention, How, Kind, Lesson, Published, Schedule, Site, Strategy, Told
from sparsebench.version import __version__
from sparsebench.view import TokenView

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
    "__version__",
    "hookimpl",
    "leaderboard",
    "load_records",
    "run",
]
