"""How the words of a request become the budgets of cells."""

from __future__ import annotations

import itertools
from typing import Any

from sparsebench.budget import AMOUNTS, SHARED, Budget
from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel
from sparsebench.measure.counts import check_fits, first_block, schedule_of, stages
from sparsebench.models.base import Model
from sparsebench.spec import Spec, fill
from sparsebench.strategy import Strategy, Traits
from sparsebench.tasks.base import Task

SHAPE_KEYS = ("schedule", "gamma", "convention", "blocks")
BUDGET_KEYS = (*AMOUNTS, *SHAPE_KEYS)
"""Parameters of a plugin's specification that are its budget's: how much, and how that is spread over the blocks."""


def budgets_of(spec: Spec, others: list[Budget]) -> list[Budget]:
    """Return the specification's own budgets, or else the others, in each of the shapes that it asks for."""
    what = f"the budget of '{spec.name}'"
    amounts: list[dict[str, Any]] = [{key: value} for key in AMOUNTS for value in spec.params.get(key, ())]
    amounts = amounts or [budget.model_dump(exclude_unset=True) for budget in others]
    swept = {key: spec.params[key] for key in SHAPE_KEYS if key in spec.params}
    shapes = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    return [fill(Budget, amount | shape, what) for amount in amounts for shape in shapes]


def shared_amount(budget: Budget) -> Budget:
    """Return the budget's amount, and its convention if it was asked for; what is left is each strategy's own."""
    return Budget(**budget.model_dump(include={*SHARED, "convention"}, exclude_unset=True))


def known_cost(task: Task, model: Model) -> CostModel | None:
    """Return the closed form of a network, or None where it is not known before that is built."""
    try:
        return model.cost(task, classes=2)
    except UserError:
        return None


def fit_budget(
    budget: Budget, strategy: Strategy, suite_blocks: tuple[int, ...] | None, cost: CostModel | None
) -> Budget:
    """Return the budget as the strategy spends it on a network: with its blocks and its convention.

    The blocks are those asked for, or the suite's, which are for its own models, or none where it acts at the input.
    Where tokens leave every block anyway the suite's are left out, so that a budget has one name on all tasks.

    Raises:
        UserError: the budget does not fit the strategy or the model.
    """
    if not strategy.budgeted:
        return budget
    inside, traits = strategy.site != "input", strategy.traits()
    if not inside and (budget.schedule or budget.blocks or not any(getattr(budget, key) for key in SHARED)):
        raise UserError(
            f"strategy '{strategy.name}' acts at the input only, once", got=f"budget {budget.label}",
            allowed="macs or keep_rate, without schedule or blocks",
            next_step="or take one of the attention or block site",
        )  # fmt: skip
    changes: dict[str, Any] = {}
    if budget.keep_rate is not None and "convention" not in budget.model_fields_set:
        changes["convention"] = strategy.convention
    deep = cost is not None and cost.depth > 1
    staged = schedule_of(budget, traits) == "stages"
    if "gamma" in budget.model_fields_set and schedule_of(budget, traits) != "late":
        raise UserError(
            f"gamma is for the late schedule, which '{strategy.name}' does not have here",
            got=f"gamma={budget.gamma:g}",
            next_step="add schedule=late, or leave gamma out",
        )
    suite_blocks = tuple(block for block in suite_blocks or () if block >= first_block(traits)) or None
    if inside and budget.blocks is None and suite_blocks is not None:
        fits = budget.counts is None or len(budget.counts) == len(suite_blocks)
        if fits and (staged or (deep and suite_blocks != _default_blocks(budget, traits, cost))):
            changes["blocks"] = suite_blocks
    budget = budget.model_copy(update=changes)
    if inside and deep:
        assert cost is not None
        check_fits(budget, traits, cost.tokens, cost.depth)
        traits.own_macs(cost.place(0, cost.tokens, cost.tokens))  # says it of parameters that do not fit the network
    return budget


def _default_blocks(budget: Budget, traits: Traits, cost: CostModel | None) -> tuple[int, ...] | None:
    """Return the blocks in which a strategy acts where nobody names any; None where counts do not fit them."""
    assert cost is not None
    return None if budget.counts is not None else stages(budget, traits, cost.depth)
