"""What a class must be to be a strategy. Imports no torch."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

from sparsebench.budget import Budget
from sparsebench.errors import StrategyError
from sparsebench.strategy import KINDS, SITES, Strategy
from sparsebench.view import NEEDS


def complaint(candidate: object) -> str | None:
    """Return what is wrong with a would-be strategy class, or None."""
    if not (isinstance(candidate, type) and issubclass(candidate, Strategy)):
        return f"{candidate!r} is not a subclass of sparsebench.Strategy"
    name = getattr(candidate, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        return f"{candidate.__name__}.name must be a plain identifier, got {name!r}"
    if candidate.kind not in KINDS:
        return f"{name}.kind must be one of {', '.join(KINDS)}, got {candidate.kind!r}"
    if candidate.site not in SITES:
        return f"{name}.site must be one of {', '.join(SITES)}, got {candidate.site!r}"
    if clash := sorted(set(candidate.model_fields) & set(Budget.model_fields)):
        return f"{name} has parameters that are words of a budget, rename them: {', '.join(clash)}"
    if extra := sorted(set(candidate.needs) - NEEDS):
        return f"{name}.needs has unknown {', '.join(extra)}; allowed: {', '.join(sorted(NEEDS))}"
    if "relevance" in candidate.needs and candidate.kind != "oracle":
        return f"{name} needs the relevance mask, so its kind must be 'oracle', got '{candidate.kind}'"
    return None


def place_of(error: BaseException, strategy: Strategy) -> str:
    """Return " (FILE:LINE)", where a strategy's own code was last in an error; "" if nowhere.

    Of what it returned, and of what breaks its contract elsewhere, that is where its `plan` or `scores` begins.
    """
    cls = type(strategy)
    package = cls.__module__.partition(".")[0]
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    if lines:
        return f" ({lines[-1]})"
    code = getattr(inspect.unwrap(cls.scores if cls.plan is Strategy.plan else cls.plan), "__code__", None)
    if code is None or not isinstance(error, StrategyError):
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
