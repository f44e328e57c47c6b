"""The class of checks, and observed runs of a strategy: what it reads and returns, and which rules it breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebench import seeds
from sparsebench.errors import StrategyError, UnsupportedError, UserError, one_line
from sparsebench.models.actor import Actor, Pass
from sparsebench.records.reports import Group
from sparsebench.runner.run_cell import deterministic
from sparsebench.strategy.base import Strategy, place_of
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plan_checks import check_form, check_numbers
from sparsebench.strategy.plans import Plan
from sparsebench.strategy.view import FrozenNetwork, Images, TokenView
from sparsebench.testing.networks import Case, cached
from sparsebench.training.evaluation import Watched, same
from sparsebench.training.fit import fit

S = TypeVar("S", bound=Strategy)
Ask = Callable[[Strategy, TokenView, int], Plan | None]


class RuleError(AssertionError):
    """A strategy breaks a rule.

    Args:
        text: what is wrong.
        check: the name of the check that has this rule; "" for the check that runs.
    """

    def __init__(self, text: str, check: str = ""):
        super().__init__(text)
        self.check = check


MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
}
"""The modes that all cells of a process share, each with a function that reads and one that sets it."""
WAITS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
"""Operations that wait for a GPU."""


def modes() -> dict[str, Any]:
    """Return the modes of the process, by name."""
    return {name: get() for name, (get, _) in MODES.items()}


@contextmanager
def keep_modes() -> Iterator[None]:
    """Restore the modes and the global random states afterwards."""
    before = modes()
    with seeds.global_states_kept():
        try:
            yield
        finally:
            for name, (_, put) in MODES.items():
                put(before[name])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the names whose values differ."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


class Runner(Watched):
    """An observed strategy, rebuilt from its parameters, on a case's network.

    Attributes:
        plans: the plans that it has returned.
        modes: the modes of the process that it has changed.
        acting, outputs: the last pass, and the outputs of the network.

    Args:
        ask: returns the plan in place of the observed strategy; called with the strategy and the arguments of `plan`.
    """

    acting: Pass
    outputs: Tensor

    def __init__(self, strategy: Strategy, case: Case, rate: float = 0.5, ask: Ask | None = None):
        super().__init__(fresh(strategy))
        self.case = case
        self._ask = ask
        self.plans: list[Plan | None] = []
        self.modes: set[str] = set()
        self.actor = actor_on(self, case, Budget(keep_rate=rate))

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Ask the strategy, check its plan, and record what it did."""
        if self._ask is not None:
            return self._ask(self.strategy, view, keep)
        before = modes()
        try:
            plan = super().plan(view, keep)
        except UnsupportedError:
            raise
        except (Exception, SystemExit) as error:
            text = one_line(error) + place_of(error, self.strategy)
            if isinstance(error, StrategyError) and "view.relevance" in text:
                raise RuleError(text, "reads_no_relevance") from error
            if isinstance(error, MemoryError) or "allocate" in text:
                text = f"ran out of memory ({text})"
            raise RuleError(text, "acts_without_error") from error
        if plan is not None:
            try:
                check_form(plan, self.strategy, view.index, keep, training=view.training, prefix=view.prefix_count)
                check_numbers(plan, self.strategy, view.index, keep, view.prefix_count)
            except StrategyError as error:
                raise RuleError(f"{error}{place_of(error, self.strategy)}", "plans_are_legal") from error
        self.plans.append(plan)
        self.modes |= differences(before, modes())
        return plan

    def fit(self, images: Images, network: FrozenNetwork) -> Any:
        """Let the strategy fit, and record what it did."""
        before = modes()
        learned = self.strategy.fit(images, network)
        self.modes |= differences(before, modes())
        return learned

    def __call__(self, rows: slice | None = None, *, inputs: Tensor | None = None, training: bool = False) -> Runner:
        """Pass some rows of the case through the network, with gradients in training only; return this object.

        The view of a strategy that acts in training only always has `training` = True.
        """
        rows = rows or slice(None)
        relevance = self.case.relevance[rows] if self.strategy.kind == "oracle" else None
        items = torch.arange(len(self.case.inputs))[rows]
        self.acting = self.actor.begin(items, 0, relevance, training=training or self.strategy.trains_only)
        with torch.set_grad_enabled(training):
            self.outputs = self.case.network((self.case.inputs if inputs is None else inputs)[rows], self.acting)
        return self


class Reads(TorchDispatchMode):
    """Counts the reads of numbers of tensors, and of shapes that depend on numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in WAITS
        return func(*args, **(kwargs or {}))


def actor_on(strategy: Any, case: Case, budget: Budget) -> Actor:
    """Return the actor of a strategy, or of its stand-in, on a case's network, after `fit` if the strategy has one.

    `fit` gets the case's inputs in reverse order, with labels that do not depend on the case.

    Raises:
        RuleError: `fit` broke a rule.
    """
    actor = Actor(strategy, budget, case.network.cost, case.network.grid, stream=5)
    if strategy.fits() and actor.acts:
        rows = torch.arange(len(case.inputs))
        images = Images(case.inputs.flip(0), rows, rows % 2 if strategy.fit_labels else None)
        try:
            fit(case.network, actor, images, case.recipe, 5, case.relevance)
        except UserError as error:
            raise RuleError(str(error), "fits_on_images") from error
    return actor


def tensors(plan: Plan | None) -> list[Tensor]:
    """Return the tensors of a plan."""
    return [value for value in (vars(plan).values() if plan is not None else ()) if isinstance(value, Tensor)]


def choices(plans: Iterable[Plan | None]) -> list[Tensor]:
    """Return all tensors of all plans, in order."""
    return [value.detach() for plan in plans for value in tensors(plan)]


def fresh(strategy: S) -> S:
    """Return the strategy rebuilt from its parameters, without any state."""
    return type(strategy).model_validate(strategy.model_dump())


def act(strategy: Strategy, case: Case, rate: float = 0.5, rows: slice | None = None) -> Runner:
    """Return a fresh strategy after one pass over a case."""
    return Runner(strategy, case, rate)(rows)


@dataclass(frozen=True)
class Check:
    """A check; call it with a strategy. It returns a remark, or raises RuleError or UnsupportedError.

    Attributes:
        name, says: its name, and the rule, which holds if it passes.
        function: takes a strategy and, if there are cases, a case; raises UnsupportedError if the strategy cannot act.
        cases: names of networks.
        alone: whether to ignore broken rules of other checks; the strategy must then act on one of the networks.
    """

    name: str
    says: str
    function: Callable[..., str | None]
    group: Group
    cases: tuple[str, ...]
    alone: bool

    def __call__(self, strategy: Strategy) -> str:
        """Run the check as cells are run, on one thread, without warnings; modes and random states are restored."""
        with keep_modes(), deterministic(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._on_each(strategy) if self.cases else self.function(strategy) or ""

    def _on_each(self, strategy: Strategy) -> str:
        """Return the remarks on all cases, and why the strategy cannot act on some of them."""
        remarks: dict[str, None] = {}
        cannot: dict[str, str] = {}
        for name in self.cases:
            try:
                remarks[self.function(strategy, cached(name)) or ""] = None
            except UnsupportedError as error:
                cannot[name] = str(error)
            except RuleError as error:
                if not self.alone or error.check in ("", self.name):
                    raise RuleError(f"{error} [{name}]", error.check) from error
        if len(cannot) == len(self.cases):
            reason = next(iter(cannot.values()))
            if self.alone:
                raise RuleError(f"it can act on none of the networks: {reason}", "acts_without_error")
            raise UnsupportedError(reason)
        notes = (f"not on '{name}': {reason}" for name, reason in cannot.items())
        return "; ".join(filter(None, (*remarks, *notes)))


CHECKS: dict[str, Check] = {}
"""All checks in their order, by name."""
F = TypeVar("F", bound=Callable[..., Any])


def check(group: Group, cases: tuple[str, ...] = (), *, alone: bool = False) -> Callable[[F], F]:
    """Return a decorator that registers a function as a check, see `Check`."""

    def add(function: F) -> F:
        name = function.__name__
        says = (function.__doc__ or "").partition("\n")[0]
        CHECKS[name] = Check(name, says, function, group, cases, alone)
        return function

    return add


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
