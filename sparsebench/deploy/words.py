"""What a user says of a strategy and its budget, as one strategy and one budget; and back to words."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sparsebench.budget import AMOUNTS, FULL, Budget
from sparsebench.contract import complaint
from sparsebench.errors import UserError, unknown
from sparsebench.planning.budgets import BUDGET_KEYS
from sparsebench.planning.contenders import specs_of
from sparsebench.plugin.registry import Registry
from sparsebench.spec import Spec, fill, parse
from sparsebench.strategy import Strategy

GIVE = "give one, as in macs=0.5, keep_rate=0.7 or per_block=13"


class Asked(NamedTuple):
    """A strategy with its budget, and the name or file it goes by.

    There is no budget where none is named and the strategy decides itself how much it spends: an adaptive one of which
    published words name none.
    """

    strategy: Strategy
    budget: Budget | None
    name: str


def understand(strategy: str | type[Strategy] | Strategy, options: dict[str, Any]) -> Asked:
    """Return the strategy and the budget that words, or a class or an instance, and options ask for.

    Raises:
        UserError: anything unknown, said twice, of several values, or missing.
    """
    if isinstance(strategy, str):
        cls, given, name = _from_text(strategy, options)
    elif isinstance(strategy, Strategy):
        if strange := sorted(set(options) - set(BUDGET_KEYS)):
            raise UserError(
                f"'{strategy.name}' is made already", got=", ".join(f"{key}={options[key]}" for key in strange),
                allowed=BUDGET_KEYS, next_step="give its parameters when you make it",
            )  # fmt: skip
        return Asked(strategy, _budget(strategy, options), strategy.name)
    else:
        if problem := complaint(strategy):
            raise UserError(problem, next_step="give words, as in 'tome:per_block=13', or a strategy")
        cls, given, name = strategy, options, strategy.name
    params = {key: value for key, value in given.items() if key not in BUDGET_KEYS}
    if strange := sorted(set(params) - set(cls.model_fields)):
        raise unknown(
            f"parameter of strategy '{cls.name}' or its budget", strange[0], [*cls.model_fields, *BUDGET_KEYS]
        )
    made = fill(cls, params, f"strategy '{cls.name}'")
    return Asked(made, _budget(made, {key: given[key] for key in given if key not in params}), name)


def _from_text(text: str, options: dict[str, Any]) -> tuple[type[Strategy], dict[str, Any], str]:
    """Return the class that the words name, what is said of it there and in the options, and the name or file."""
    registry, spec = Registry(), parse(text)
    specs: list[Spec] = specs_of(text, registry)
    if len(specs) != 1:
        names = ", ".join(each.name for each in specs)
        raise UserError(
            "a network takes one strategy", got=f"'{text}': {names}", next_step="name one, or give its class"
        )
    registered = registry.strategy(specs[0].name)
    if registered.failure:
        raise UserError(f"strategy '{specs[0].name}' does not load", got=registered.failure)
    if several := sorted(key for key, values in spec.params.items() if len(values) > 1):
        values = ",".join(map(str, spec.params[several[0]]))
        raise UserError("a network takes one value a parameter", got=f"{several[0]}={values}")
    if twice := sorted(set(spec.params) & set(options)):
        raise UserError(f"'{twice[0]}' is said twice", got=f"'{text}' and {twice[0]}={options[twice[0]]}")
    given = {key: values[0] for key, values in spec.params.items()} | options
    return registered.cls, given, spec.name


def _budget(strategy: Strategy, given: dict[str, Any]) -> Budget | None:
    what = f"the budget of '{strategy.name}'"
    if strategy.budgeted and not any(given.get(key) is not None for key in AMOUNTS):
        bare = any(not parse(one.words).params.keys() & AMOUNTS for one in strategy.published)
        if bare and strategy.adaptive and not given:
            return None
        raise UserError(f"{what} is missing", next_step=GIVE)
    if not strategy.budgeted and given:
        raise UserError(f"'{strategy.name}' spends no budget", got=", ".join(sorted(given)), next_step="leave it out")
    return fill(Budget, given, what) if strategy.budgeted else FULL


def words(asked: Asked) -> str:
    """Return what `understand` makes the same of, where the strategy is known by its name or file.

    >>> words(understand("tome:per_block=13", {"proportional": False}))
    'tome:proportional=false,per_block=13'
    """
    params = asked.strategy.model_dump(mode="json", exclude_defaults=True)
    amounts = asked.budget.model_dump(exclude_unset=True) if asked.budget and asked.strategy.budgeted else {}
    said = {**params, **{key: value for key, value in amounts.items() if value is not None}}
    return asked.name + (":" + ",".join(f"{key}={_text(value)}" for key, value in said.items()) if said else "")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
