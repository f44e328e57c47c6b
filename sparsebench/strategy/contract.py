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
    return complaint_on_revision(candidate) or next(
        (f"{name}{what}" for what, wrong in _complaints(candidate).items() if wrong), None
    )


def _complaints(cls: type[Strategy]) -> dict[str, object]:
    """Return what may be wrong with a class, each with what is true where it is."""
    needs = set(cls.needs) if isinstance(cls.needs, set | frozenset) else set[str]()
    count, clash = cls.fit_images, set(cls.model_fields) & set(Budget.model_fields)
    decides = not cls.budgeted or cls.plan is not Strategy.plan or cls.scores is not Strategy.scores
    methods = () if decides else ("scores", "plan")  # of 40 classes the likest names take a second
    near = [name for method in methods for name in difflib.get_close_matches(method, vars(cls), n=1)]
    return {
        f".kind must be one of {', '.join(KINDS)}, got {cls.kind!r}": cls.kind not in KINDS,
        f".site must be one of {', '.join(SITES)}, got {cls.site!r}": cls.site not in SITES,
        " lets tokens rest, so its site must be 'block', and it neither adaptive nor trained":
            cls.how == "rest" and (cls.site != "block" or cls.adaptive or cls.trained),
        " has a fit and no module: write module(place), which returns what holds the tensors of fit":
            cls.fits() and cls.module is Strategy.module,
        " has a fit and is trained: it is one or the other, leave out fit or trained = True":
            cls.fits() and cls.trained,
        f".fit_images must be a number of images, 1 or more, got {count!r}":
            not isinstance(count, int) or isinstance(count, bool) or count < 1,
        f" has parameters with names of budget options; rename them: {', '.join(sorted(clash))}": clash,
        f".needs must be a set, as frozenset({{'keys'}}), got {cls.needs!r}":
            not isinstance(cls.needs, set | frozenset),
        f".needs has unknown {', '.join(sorted(needs - NEEDS))}; allowed: {', '.join(sorted(NEEDS))}": needs - NEEDS,
        f" needs the relevance mask, so its kind must be 'oracle', got '{cls.kind}'":
            "relevance" in needs and cls.kind != "oracle",
        f" needs previous_attention, so its site must be 'block', got '{cls.site}'":
            "previous_attention" in needs and cls.site != "block",
        " has neither scores(self, view) nor plan(self, view, keep); "
        + (f"rename {near[0]}" if near else "write one of them"): not decides,
    }  # fmt: skip


def complaint_on_revision(cls: type) -> str | None:
    """Return what is wrong with the revision that a strategy, task or model declares, or None."""
    revision = getattr(cls, "revision", None)
    if isinstance(revision, int) and not isinstance(revision, bool) and revision >= 1:
        return None
    return f"{getattr(cls, 'name', cls.__name__)}.revision must be a whole number, 1 or more, got {revision!r}"


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
