"""What is asked of a run, and which strategies at which budgets that comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparsebench.budget import FULL, SHARED, Budget
from sparsebench.planning.budgets import BUDGET_KEYS, budgets_of, shared_amount
from sparsebench.planning.suite import Suite, SuiteTask
from sparsebench.plugin.registry import Found, Registry
from sparsebench.records.cell import Part, Where
from sparsebench.spec import Spec, fill, parse
from sparsebench.strategy import Strategy

ALL = "all"
"""In place of a strategy's name: every one that is installed."""
Contender = tuple[Strategy, Found, Budget, Part]
"""The part is made once: a hundred thousand cells share a few."""


@dataclass(frozen=True)
class Request:
    """What a run was asked for, on top of its suite; None and () leave the suite's own.

    Attributes:
        plugins, tasks: NAME, NAME:param=v1,v2, and for plugins a path to a .py file.
        model: NAME or NAME:param=v, for every task it fits.
        pretrained: whether models of images begin with trained weights that are fetched for them.
        weights: name of located trained weights that models of images begin with.
        keep, macs: budgets to sweep over, in place of the suite's.
        images, backgrounds, pretrain_images: names of located image sets, for every image task that trains.
        tested_images: the name of located images for tasks that train nothing.
        where: whether tokens are removed in training, in the test, or in both; "both" leaves the suite's own.
        figures: only what the suite has for these figures of a paper.
        single: whether a task with several budgets has its suite's one: two strategies are to be looked at, not judged.
        alone: whether the plugins are all, without the suite's baselines and its tasks' own strategies.
    """

    plugins: tuple[str, ...] = ()
    suite: str = "quick"
    tasks: tuple[str, ...] = ()
    model: str | None = None
    pretrained: bool = False
    weights: str | None = None
    images: str | None = None
    backgrounds: str | None = None
    pretrain_images: str | None = None
    tested_images: str | None = None
    seeds: int | None = None
    keep: tuple[float, ...] = ()
    macs: tuple[float, ...] = ()
    n_train: tuple[int, ...] = ()
    where: Where = "both"
    figures: tuple[str, ...] = ()
    single: bool = False
    alone: bool = False


def contenders_of(
    suite: Suite, entry: SuiteTask, plugins: list[Spec], request: Request, registry: Registry
) -> Iterator[Contender]:
    """Yield every strategy with its parameters and each of its budgets: the plugins asked for and the baselines.

    A plugin that names budgets of its own is run at those; the baselines are run at every amount that occurs, spread
    their own way. Tokens per block are no amount that strategies at the input share. A task with strategies of its own
    has those in place of the baselines.
    """
    own = () if request.alone else entry.strategies
    specs = plugins + [parse(text) for text in own or ()]
    shared = [Budget(keep_rate=rate) for rate in request.keep] + [Budget(macs=share) for share in request.macs]
    usual = shared or list(() if request.single else entry.budgets)
    usual = usual or [Budget(**suite.budget.model_dump(exclude={"blocks"}, exclude_unset=True))]
    budgets = [budgets_of(spec, usual) for spec in specs]
    amounts = (
        shared_amount(budget) for some in budgets for budget in some if any(getattr(budget, key) for key in SHARED)
    )
    every = list(dict.fromkeys(amounts)) or usual
    baselines = [(Spec(name), every) for name in suite.baselines] if own is None else []
    for spec, some in [*zip(specs, budgets, strict=True), *baselines]:
        found = registry.strategy(spec.name)
        for params in spec.combinations(without=BUDGET_KEYS):
            strategy = found.cls() if found.failure else fill(found.cls, params, f"strategy '{spec.name}'")
            part = Part.of(strategy)
            for budget in some if strategy.budgeted else [FULL]:
                yield strategy, found, budget, part


def named(text: str, registry: Registry) -> list[Spec]:
    """Return the specifications of a plugin argument: one, one for each strategy of a file, or of `ALL` there are."""
    spec = parse(text)
    if spec.name == ALL:
        return [Spec(found.cls.name, spec.params) for found in registry.strategies()]
    if not spec.name.endswith(".py"):
        return [spec]
    return [Spec(name, spec.params) for name in registry.load_file(Path(spec.name))]
