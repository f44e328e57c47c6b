"""Which strategies at which budgets a request comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sparsebench.budget import FULL, SHARED, Budget
from sparsebench.errors import UserError
from sparsebench.planning.budgets import BUDGET_KEYS, budgets_of, shared_amount
from sparsebench.planning.request import Request
from sparsebench.planning.suite import Suite, SuiteTask
from sparsebench.plugin.registry import Found, Registry
from sparsebench.records.cell import Part
from sparsebench.spec import Spec, fill, parse
from sparsebench.strategy import Strategy

ALL = "all"
"""In place of a strategy's name: every one that is installed."""
Contender = tuple[Strategy, Found, Budget, Part]
"""The part is made once: a hundred thousand cells share a few."""
DRAWING = frozenset({"random", "random_inside", "oracle", "anti_oracle", "tnt", "perturbation", "dpc_knn", "k_medoids"})
"""The shipped strategies whose tests depend on `view.random`; the hash of a file, which names its cells, lies on it."""


def draws_random(found: Found) -> bool:
    """Say whether a strategy may do another thing when a trained network is tested with it again."""
    if found.cls.draws_random is not None:
        return found.cls.draws_random
    return found.cls.name in DRAWING if found.origin.is_shipped else True


def contenders_of(
    suite: Suite, entry: SuiteTask, plugins: list[Spec], request: Request, registry: Registry
) -> Iterator[Contender]:
    """Yield every strategy with its parameters and each of its budgets: the plugins asked for and the baselines.

    A plugin that names budgets of its own is run at those; the baselines are run at every amount that occurs, spread
    their own way. Tokens per block are no amount that strategies at the input share. A task with strategies of its own
    has those in place of the baselines.

    Raises:
        UserError: a budget is named twice.
    """
    named_here = () if request.alone else entry.strategies
    specs = plugins + [parse(text) for text in named_here or ()]
    usual = usual_budgets(suite, entry, request)
    budgets = [budgets_of(spec, usual) for spec in specs]
    for each in (usual, *budgets):
        _check_different(each)
    amounts = (
        shared_amount(budget) for each in budgets for budget in each if any(getattr(budget, key) for key in SHARED)
    )
    every = list(dict.fromkeys(amounts)) or usual
    baselines = [(Spec(name), every) for name in suite.baselines] if named_here is None else []
    for spec, each in [*zip(specs, budgets, strict=True), *baselines]:
        registered = registry.strategy(spec.name)
        for params in spec.combinations(without=BUDGET_KEYS):
            what = f"strategy '{spec.name}'"
            strategy = registered.cls() if registered.failure else fill(registered.cls, params, what, BUDGET_KEYS)
            part = Part.of(strategy)
            for budget in each if strategy.budgeted else [FULL]:
                yield strategy, registered, budget, part


def usual_budgets(suite: Suite, entry: SuiteTask, request: Request) -> list[Budget]:
    """Return the budgets of a strategy that names none: those of the request, else of the task, else of the suite."""
    shared = [Budget(keep_rate=rate) for rate in request.keep] + [Budget(macs=share) for share in request.macs]
    usual = shared or list(() if request.single else entry.budgets)
    return usual or [Budget(**suite.budget.model_dump(exclude={"blocks"}, exclude_unset=True))]


def _check_different(budgets: list[Budget]) -> None:
    """Raise UserError if a budget is there twice: its cells would be the same."""
    twice = [budget.label for budget, n in Counter(budgets).items() if n > 1]
    if twice:
        raise UserError(
            "budgets", got=f"{', '.join(twice)} more than once", allowed="each once, in any order",
            next_step="leave the second one out",
        )  # fmt: skip


def specs_of(text: str, registry: Registry) -> list[Spec]:
    """Return the specifications of a plugin argument: one, one for each strategy of a file, or of `ALL` there are."""
    spec = parse(text)
    if "," in spec.name:
        raise UserError(
            "one strategy a word", got=f"'{text}'", next_step=f"sparsebench run {spec.name.replace(',', ' ')}"
        )
    if spec.name == ALL:
        return [Spec(registered.cls.name, spec.params) for registered in registry.strategies()]
    if not spec.name.endswith(".py"):
        return [spec]
    return [Spec(name, spec.params) for name in registry.load_file(Path(spec.name))]
