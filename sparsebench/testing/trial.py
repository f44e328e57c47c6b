"""What a check is, and a strategy that acts under observation: what it read, what it returned, which rule it broke."""

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
from sparsebench.runner.run_cell import one_thread
from sparsebench.strategy.base import Strategy, place_of
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plan_checks import check_form, check_numbers
from sparsebench.strategy.plans import Plan
from sparsebench.strategy.view import FrozenNetwork, Images, TokenView
from sparsebench.testing.networks import Case, cached
from sparsebench.testing.reports import Group
from sparsebench.training.fit import StandIn, fit

S = TypeVar("S", bound=Strategy)
Ask = Callable[[Strategy, TokenView, int], Plan | None]


class RuleError(AssertionError):
    """A strategy breaks a rule.

    Args:
        text: what is wrong.
        check: the name of the check that asks for this rule; "" for the one that runs.
    """

    def __init__(self, text: str, check: str = ""):
        super().__init__(text)
        self.check = check


MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
}
"""What every cell of a process has in common: how it is read, and how it is set."""
WAITS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
"""What waits for a GPU."""


def modes() -> dict[str, Any]:
    """Return the modes of the process, by name."""
    return {name: get() for name, (get, _) in MODES.items()}


@contextmanager
def keep_modes() -> Iterator[None]:
    """Have modes and global random states afterwards as before."""
    before = modes()
    with seeds.global_states_kept():
        try:
            yield
        finally:
            for name, (_, put) in MODES.items():
                put(before[name])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the names under which two of these differ."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


class _Spy(TokenView):
    """A view that remembers what is read of it, and what that was."""

    def __init__(self, view: TokenView, read: set[str]):
        shown = {"index": view.index.clone(), "sizes": view.sizes.clone()}
        self.__dict__.update(view.__dict__, _read=read, _shown=shown)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._read.add(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor):
            self._shown.setdefault(name, value.detach().clone())
        return value

    def _changed(self) -> set[str]:
        """Return the names of what is no longer what was shown."""
        return {name for name, was in self._shown.items() if not same(vars(self)[name], was)}


class Runner(StandIn):
    """A strategy on a case's network, made anew from its parameters and observed.

    Attributes:
        plans: its answers so far.
        read: the attributes of views that it has read.
        changed: those that it has changed in place.
        modes: what it has changed of the whole process.
        acting, outputs: the last pass, and what came out of the network.

    Args:
        ask: gives the plan in place of the observed strategy; its arguments are the strategy and those of `plan`.
    """

    acting: Pass
    outputs: Tensor

    def __init__(self, strategy: Strategy, case: Case, rate: float = 0.5, ask: Ask | None = None):
        super().__init__(fresh(strategy))
        self.case, self._ask, self.plans = case, ask, list[Plan | None]()
        self.read, self.changed, self.modes = set[str](), set[str](), set[str]()
        self.actor = actor_on(self, case, Budget(keep_rate=rate))

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Ask the strategy, check its plan, and note what it did."""
        if self._ask is not None:
            return self._ask(self.strategy, view, keep)
        spy, before = _Spy(view, self.read), modes()
        try:
            plan = self.strategy.plan(spy, keep)
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
                about = plan, self.strategy, view.index, keep
                check_form(*about, training=view.training, prefix=view.prefix_count)
                check_numbers(*about, view.prefix_count)
            except StrategyError as error:
                raise RuleError(f"{error}{place_of(error, self.strategy)}", "plans_are_legal") from error
        self.plans.append(plan)
        self.changed |= spy._changed()
        self.modes |= differences(before, modes())
        return plan

    def fit(self, images: Images, network: FrozenNetwork) -> Any:
        """Let the strategy fit, and note what it did."""
        before = modes()
        learned = self.strategy.fit(images, network)
        self.modes |= differences(before, modes())
        return learned

    def __call__(self, rows: slice | None = None, *, inputs: Tensor | None = None, training: bool = False) -> Runner:
        """Pass some rows of the case through the network, without gradients unless in training; return this object.

        A strategy that acts in training only is told that it is training in any case.
        """
        rows = rows or slice(None)
        relevance = self.case.relevance[rows] if self.strategy.kind == "oracle" else None
        items = torch.arange(len(self.case.inputs))[rows]
        self.acting = self.actor.begin(items, 0, relevance, training=training or self.strategy.trains_only)
        with torch.set_grad_enabled(training):
            self.outputs = self.case.network((self.case.inputs if inputs is None else inputs)[rows], self.acting)
        return self


class Reads(TorchDispatchMode):
    """Counts the numbers, and the shapes that hang on numbers, that are read of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in WAITS
        return func(*args, **(kwargs or {}))


def actor_on(strategy: Any, case: Case, budget: Budget) -> Actor:
    """Return a strategy, or what stands in for it, on a case's network; one with a `fit` has looked at images.

    These are not the case's own, and their labels and masks are always the same.

    Raises:
        RuleError: what `fit` did wrong.
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
    """Return the strategy made anew from its parameters, without what it may have remembered."""
    return type(strategy).model_validate(strategy.model_dump())


def act(strategy: Strategy, case: Case, rate: float = 0.5, rows: slice | None = None) -> Runner:
    """Return a fresh strategy after one pass over a case."""
    return Runner(strategy, case, rate)(rows)


@dataclass(frozen=True)
class Check:
    """A check; call it with a strategy. It returns a remark and raises RuleError or UnsupportedError.

    Attributes:
        name, says: what it is called, and what holds where it passes.
        function: takes a strategy and, if there are cases, one of these; raises UnsupportedError where it cannot act.
        cases: names of networks.
        alone: whether violations of other checks' rules are no matter, but it must act on one of the networks.
    """

    name: str
    says: str
    function: Callable[..., str | None]
    group: Group
    cases: tuple[str, ...]
    alone: bool

    def __call__(self, strategy: Strategy) -> str:
        """Run it as a cell is run: on one thread, without warnings; what it changes of the process is put back."""
        with keep_modes(), one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._on_each(strategy) if self.cases else self.function(strategy) or ""

    def _on_each(self, strategy: Strategy) -> str:
        """Return what there is to say of all cases, and on which of them the strategy cannot act."""
        remarks, cannot = dict[str, None](), dict[str, str]()
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
    """Return a decorator that makes a check of a function, see `Check`."""

    def add(function: F) -> F:
        name, says = function.__name__, (function.__doc__ or "").partition("\n")[0]
        CHECKS[name] = Check(name, says, function, group, cases, alone)
        return function

    return add


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors are equal bit for bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)))


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """Say whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
