"""The strategies and budgets of a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel
from sparsebench.measure.schedule import TokenSchedule, first_block, kind_of, only_schedule
from sparsebench.models.base import Model
from sparsebench.plan.request import Request
from sparsebench.plan.suite import Suite, SuiteTask
from sparsebench.plugin.registry import PluginClass, Registry
from sparsebench.records.record import Part
from sparsebench.strategy.base import Strategy, Traits
from sparsebench.strategy.budget import AMOUNTS, ANY_SITE, AUTO, FULL, Budget
from sparsebench.strategy.spec import Spec, fill, parse
from sparsebench.tasks.base import Task

SCHEDULED = frozenset({"blocks", "per_block", "ratio", "counts"})
"""Parameters of a published setting that state a schedule."""
SHAPE_KEYS = ("schedule", "gamma", "convention", "blocks")
BUDGET_KEYS = (*AMOUNTS, *SHAPE_KEYS)
"""Parameters of a plugin's specification that belong to its budget: its amount, and how it is spread over blocks."""


def budgets_of(spec: Spec, defaults: list[Budget]) -> list[Budget]:
    """Return the budgets of a specification, or else `defaults`, with each combination of its schedule parameters."""
    label = f"the budget of '{spec.name}'"
    amounts: list[dict[str, Any]] = [{key: value} for key in AMOUNTS for value in spec.params.get(key, ())]
    amounts = amounts or [budget.model_dump(exclude_unset=True) for budget in defaults]
    swept = {key: spec.params[key] for key in SHAPE_KEYS if key in spec.params}
    shapes = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    return [fill(Budget, amount | shape, label) for amount in amounts for shape in shapes]


def strategies_of(spec: Spec, registry: Registry) -> list[Strategy]:
    """Return a strategy for each combination of the swept parameters of a specification."""
    cls = registry.strategy(spec.name).cls
    owner = f"strategy '{spec.name}'"
    return [fill(cls, params, owner, BUDGET_KEYS) for params in spec.combinations(without=BUDGET_KEYS)]


def settings_of(
    words: str, registry: Registry, defaults: list[Budget] | None = None, more: Mapping[str, Any] | None = None
) -> list[tuple[Strategy, Budget | None]]:
    """Return each strategy of a plugin argument with each of its budgets; None if it has no budget.

    Args:
        words: the argument, as after --plugin.
        registry: the registered strategies.
        defaults: budgets of strategies whose specification has none.
        more: additional parameters and budget parameters.

    Raises:
        UserError: a strategy is unknown or does not load, or a parameter is unknown or has an invalid value.
    """
    settings: list[tuple[Strategy, Budget | None]] = []
    for spec in specs_of(words, registry):
        spec = Spec(spec.name, spec.params | {key: [value] for key, value in (more or {}).items()})
        budgets: list[Budget | None] = [*budgets_of(spec, defaults or [])]
        settings += itertools.product(strategies_of(spec, registry), budgets or [None])
    return settings


def closed_cost(task: Task, model: Model) -> CostModel | None:
    """Return the cost model of a network, or None if it is unknown before the network is built."""
    try:
        return model.cost(task, classes=2)
    except UserError:
        return None


def _without_choice(budget: Budget, strategy: Strategy, cost: CostModel | None) -> Budget:
    """Return a budget with schedule=auto, without this word if the strategy has only one schedule on the network."""
    removes_nothing = budget.macs == 1
    one_block = cost is not None and cost.depth == 1
    if only_schedule(strategy) or removes_nothing or one_block:
        return budget.model_copy(update={"schedule": None})
    return budget


def fit_budget(
    budget: Budget, strategy: Strategy, suite_blocks: tuple[int, ...] | None, cost: CostModel | None
) -> Budget:
    """Return the budget with the blocks and the convention that the strategy uses on a network.

    The blocks are those of the budget, or else of the suite, which are for the suite's own models. The suite's blocks
    are left out if the strategy acts at the input, or without stages in these blocks anyway: the budget then has one
    name on all tasks. With schedule=auto the blocks are chosen later, on the network; the word is left out if there is
    nothing to choose.

    Raises:
        UserError: the budget does not fit the strategy or the model.
    """
    if not strategy.budgeted:
        return budget
    if budget.schedule == AUTO:
        return _without_choice(budget, strategy, cost)
    _check_schedule_of(budget, strategy)
    if budget.keep_rate is not None and "convention" not in budget.model_fields_set:
        budget = budget.model_copy(update={"convention": strategy.convention})
    if strategy.site == "input":
        return budget
    traits = strategy.traits()
    deep = cost if cost is not None and cost.depth > 1 else None
    if budget.blocks is None:
        budget = _with_blocks_of_suite(budget, traits, suite_blocks, deep)
    if deep is not None:
        TokenSchedule(budget, traits, deep)  # raises if the budget does not fit
        traits.own_macs(deep.place(0, deep.tokens, deep.tokens))  # raises if parameters do not fit the network
    return budget


def _check_schedule_of(budget: Budget, strategy: Strategy) -> None:
    """Raise UserError if a budget states a schedule, or a part of one, that the strategy cannot have."""
    states_places = bool(budget.schedule or budget.blocks)
    is_share = any(getattr(budget, key) for key in ANY_SITE)
    if strategy.site == "input" and (states_places or not is_share):
        raise UserError(
            f"strategy '{strategy.name}' acts at the input only, once",
            got=f"budget {budget.label}",
            allowed="macs or keep_rate, without schedule or blocks",
            next_step="or use a strategy of site attention or block",
        )
    if "gamma" in budget.model_fields_set and kind_of(budget, strategy.traits()) != "late":
        raise UserError(
            f"gamma is for the late schedule, which '{strategy.name}' does not have here",
            got=f"gamma={budget.gamma:g}",
            next_step="add schedule=late, or leave gamma out",
        )


def _with_blocks_of_suite(
    budget: Budget, traits: Traits, suite_blocks: tuple[int, ...] | None, deep: CostModel | None
) -> Budget:
    """Return a budget without blocks with those of the suite, if the strategy can act there.

    A strategy that acts in other blocks than stages has the suite's blocks only if they differ from its own. The budget
    of one that acts in stages always names them.

    Args:
        budget: the budget.
        traits: the properties of the strategy.
        suite_blocks: the blocks of the suite, or None.
        deep: the cost model of the network if it has several blocks, else None.
    """
    blocks = tuple(block for block in suite_blocks or () if block >= first_block(traits))
    if not blocks or (budget.counts is not None and len(budget.counts) != len(blocks)):
        return budget
    with_blocks = budget.model_copy(update={"blocks": blocks})
    if kind_of(budget, traits) == "stages":
        return with_blocks
    if deep is None:
        return budget
    usual = None if budget.counts is not None else TokenSchedule(budget, traits, deep).blocks
    return budget if blocks == usual else with_blocks


ALL = "all"
"""Stands for all installed strategies; see `testable` for tasks that train nothing."""


class Contender(NamedTuple):
    """A strategy at a budget.

    Attributes:
        strategy: the strategy with its parameters.
        registered: its class as registered.
        budget: the budget.
        part: the strategy as a part of cells, which is built once, as many cells share it.
    """

    strategy: Strategy
    registered: PluginClass
    budget: Budget
    part: Part


def draws_random(entry: PluginClass) -> bool:
    """Return whether repeated tests of a network with a strategy may differ. Third-party strategies have to deny it."""
    return not entry.origin.is_shipped if entry.cls.draws_random is None else entry.cls.draws_random


def contenders_of(
    suite: Suite, entry: SuiteTask, plugins: list[Spec], request: Request, registry: Registry
) -> Iterator[Contender]:
    """Yield the requested strategies and the baselines, each with its parameters and each of its budgets.

    A plugin with its own budgets is run at these. Baselines are run at all different amounts of MACs and keep rates
    that occur, with their own schedules. If a task has its own strategies, they replace the baselines.
    """
    usual = usual_budgets(suite, entry, request)
    specs = list(plugins)
    if entry.strategies is not None and not request.alone:
        specs += map(parse, entry.strategies)
    groups = [(spec, budgets_of(spec, usual)) for spec in specs]
    runs_baselines = entry.strategies is None and not request.alone
    if runs_baselines:
        shared = _budgets_of_baselines([budgets for _, budgets in groups]) or usual
        groups += [(Spec(name), shared) for name in _baselines(suite, entry, registry)]

    for spec, budgets in groups:
        registered = registry.strategy(spec.name)
        for strategy in strategies_of(spec, registry):
            part = Part.of(strategy)
            for budget in budgets if strategy.budgeted else [FULL]:
                yield Contender(strategy, registered, budget, part)
                is_open = budget in usual and budget.schedule == AUTO
                if is_open and has_published_schedule(registered.cls):
                    # The published schedule is a part of the method. So boards also show the method as published, and
                    # not only at the schedule that is chosen here.
                    published = budget.model_copy(update={"schedule": None})
                    yield Contender(strategy, registered, published, part)


def _baselines(suite: Suite, entry: SuiteTask, registry: Registry) -> list[str]:
    """Return the baselines of a task: those of the suite, without oracles for probes on pictures of the user.

    Nobody knows the relevant tokens of these pictures.
    """
    if not entry.is_probe or registry.task(entry.name).trains:
        return list(suite.baselines)
    return [name for name in suite.baselines if registry.strategy(name).cls.kind != "oracle"]


def _budgets_of_baselines(groups: Sequence[Sequence[Budget]]) -> list[Budget]:
    """Return the different budgets of strategies that baselines can have too, without blocks and kinds of schedules.

    They keep an explicit convention, and schedule=auto, so that random tokens also act where they do least harm.
    """
    budgets: dict[Budget, None] = {}
    for budget in itertools.chain(*groups):
        if not any(getattr(budget, key) for key in ANY_SITE):
            continue
        kept = {*ANY_SITE, "convention"}
        if budget.schedule == AUTO:
            kept.add("schedule")
        budgets[Budget(**budget.model_dump(include=kept, exclude_unset=True))] = None
    return list(budgets)


def has_published_schedule(cls: type[Strategy]) -> bool:
    """Return whether the schedule is a part of the published method: a published setting names blocks or counts.

    Where the suite leaves schedules open, such a strategy also runs with its own schedule.
    """
    return any(parse(setting.words).params.keys() & SCHEDULED for setting in cls.published)


def testable(
    contenders: Sequence[Contender], suite: Suite, request: Request, registry: Registry, cost: CostModel | None
) -> tuple[Contender, ...]:
    """Return the contenders that can be tested on a task that trains nothing.

    Strategies that only `ALL` names are left out if they are trained or fitted, are oracles, or need more MACs than the
    dense network at each of their budgets.
    """
    others = [text for text in request.plugins if parse(text).name != ALL]
    names_all = len(others) < len(request.plugins)
    if not names_all:
        return tuple(contenders)
    explicit = {*suite.baselines, *(spec.name for text in others for spec in specs_of(text, registry))}

    def can(contender: Contender) -> bool:
        strategy, budget = contender.strategy, contender.budget
        if contender.part.name in explicit:
            return True
        if strategy.trained or strategy.trains_only or strategy.fits() or strategy.kind == "oracle":
            return False
        if not strategy.budgeted or cost is None:
            return True
        schedule = TokenSchedule(budget, strategy.traits(), cost)
        steps = cost.steps(schedule.traits, schedule.blocks, schedule.counts)
        return cost.macs(steps) <= cost.macs(cost.dense())

    # One budget that can be tested keeps a strategy with all its budgets.
    names = {contender.part.name for contender in contenders if can(contender)}
    return tuple(contender for contender in contenders if contender.part.name in names)


def usual_budgets(suite: Suite, entry: SuiteTask, request: Request) -> list[Budget]:
    """Return the budgets of strategies without their own: those of the request, else of the task, else of the suite.

    Where task or suite leave the schedule open, the shares of MACs of a request leave it open too.
    """
    of_suite = list(() if request.single else entry.budgets)
    of_suite = of_suite or [Budget(**suite.budget.model_dump(exclude={"blocks"}, exclude_unset=True))]
    chooses = all(budget.schedule == AUTO for budget in of_suite)
    schedule = {"schedule": AUTO} if chooses else {}
    of_request = [Budget(keep_rate=rate) for rate in request.keep]
    of_request += [Budget(macs=share, **schedule) for share in request.macs]
    return of_request or of_suite


def specs_of(text: str, registry: Registry) -> list[Spec]:
    """Return the specifications of a plugin argument, which names a strategy, all strategies of a file, or `ALL`.

    Raises:
        UserError: of several strategies of a file, only some have a parameter.
    """
    spec = parse(text)
    if spec.name == ALL:
        return [Spec(registered.cls.name, spec.params) for registered in registry.strategies()]
    if not spec.name.endswith(".py"):
        return [spec]
    names = registry.load_file(Path(spec.name))
    specs = [Spec(name, spec.params) for name in names]
    if len(names) == 1:
        return specs
    for key, (value, *_) in spec.params.items():
        owners = [name for name in names if key in {*registry.strategy(name).cls.model_fields, *BUDGET_KEYS}]
        if owners and owners != names:
            raise UserError(
                f"{spec.name} has several strategies, and not all have parameter '{key}'",
                got=f"'{text}'",
                next_step=f"name the file, then the strategy: {spec.name} {owners[0]}:{key}={value}",
            )
    return specs
