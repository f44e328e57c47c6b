"""What a class must be to be a strategy. Imports no torch."""

from __future__ import annotations

import difflib
import inspect
import traceback
from pathlib import Path

from sparsebench.errors import StrategyError
from sparsebench.strategy.base import KINDS, SITES, Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.view import NEEDS


def complaint(candidate: object) -> str | None:
    """Return what is wrong with a would-be strategy class, or None."""
    if isinstance(candidate, Strategy):
        return f"{candidate!r} is an instance of a strategy; return the class, {type(candidate).__name__}"
    if not (isinstance(candidate, type) and issubclass(candidate, Strategy)):
        return f"{candidate!r} is not a subclass of sparsebench.Strategy"
    name = getattr(candidate, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        return f"{candidate.__name__}.name must be a plain identifier, got {name!r}"
    if candidate.kind not in KINDS:
        return f"{name}.kind must be one of {', '.join(KINDS)}, got {candidate.kind!r}"
    if candidate.site not in SITES:
        return f"{name}.site must be one of {', '.join(SITES)}, got {candidate.site!r}"
    if candidate.how == "rest" and (candidate.site != "block" or candidate.adaptive or candidate.trained):
        return f"{name} lets tokens rest, so its site must be 'block', and it neither adaptive nor trained"
    if problem := complaint_on_revision(candidate) or _complaint_on_fit(candidate):
        return problem
    if clash := sorted(set(candidate.model_fields) & set(Budget.model_fields)):
        return f"{name} has parameters with names of budget options; rename them: {', '.join(clash)}"
    return _complaint_on_needs(candidate) or _complaint_on_methods(candidate)


def complaint_on_revision(cls: type) -> str | None:
    """Return what is wrong with the revision that a strategy, task or model declares, or None."""
    revision = getattr(cls, "revision", None)
    if isinstance(revision, int) and not isinstance(revision, bool) and revision >= 1:
        return None
    return f"{getattr(cls, 'name', cls.__name__)}.revision must be a whole number, 1 or more, got {revision!r}"


def _complaint_on_methods(strategy: type[Strategy]) -> str | None:
    """Return what is wrong with a class that decides nothing, or None."""
    if not strategy.budgeted or strategy.plan is not Strategy.plan or strategy.scores is not Strategy.scores:
        return None
    near = [name for method in ("scores", "plan") for name in difflib.get_close_matches(method, vars(strategy), n=1)]
    what = f"rename {near[0]}" if near else "write one of them"
    return f"{strategy.name} has neither scores(self, view) nor plan(self, view, keep); {what}"


def _complaint_on_fit(strategy: type[Strategy]) -> str | None:
    """Return what is wrong with a class that looks at training images first, or None."""
    if not strategy.fits():
        return None
    name, count = strategy.name, strategy.fit_images
    if strategy.module is Strategy.module:
        return f"{name} has a fit and no module: write module(place), which returns what holds the tensors of fit"
    if strategy.trained:
        return f"{name} has a fit and is trained: it is one or the other, leave out fit or trained = True"
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return f"{name}.fit_images must be a number of images, 1 or more, got {count!r}"
    return None


def _complaint_on_needs(strategy: type[Strategy]) -> str | None:
    """Return what is wrong with what a class says that it reads, or None."""
    name = strategy.name
    if not isinstance(strategy.needs, set | frozenset):
        return f"{name}.needs must be a set, as frozenset({{'keys'}}), got {strategy.needs!r}"
    needs = set(strategy.needs)
    if extra := sorted(needs - NEEDS):
        return f"{name}.needs has unknown {', '.join(extra)}; allowed: {', '.join(sorted(NEEDS))}"
    if "relevance" in needs and strategy.kind != "oracle":
        return f"{name} needs the relevance mask, so its kind must be 'oracle', got '{strategy.kind}'"
    if "previous_attention" in needs and strategy.site != "block":
        return f"{name} needs previous_attention, so its site must be 'block', got '{strategy.site}'"
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
    if not isinstance(error, StrategyError):
        return ""
    return line_of(strategy, "scores" if cls.plan is Strategy.plan else "plan")


def line_of(strategy: Strategy, method: str) -> str:
    """Return " (FILE:LINE)", where a method of a strategy begins; "" where that is not known."""
    code = getattr(inspect.unwrap(getattr(type(strategy), method)), "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
