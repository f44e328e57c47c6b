"""What a check is, and a strategy that acts under observation: what it read, what it returned, which rule it broke."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

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


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names under which two of these differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class _Spy(TokenView):
    """A view that remembers what is read of it, and what that was."""

    def __init__(self, view: TokenView):
        self.__dict__.update(view.__dict__)
        self.__dict__["read"] = set()
        self.__dict__["shown"] = {"index": view.index.clone(), "sizes": view.sizes.clone()}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            super().__getattribute__("__dict__").get("read", set()).add(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor):
            self.__dict__["shown"].setdefault(name, value.detach().clone())
        return value

    def changes(self) -> list[str]:
        """Return the names of what is no longer what was shown."""
        now = self.__dict__
        return [name for name, was in self.__dict__["shown"].items() if not same(now[name], was)]


class Call(NamedTuple):
    """One question to a strategy.

    Attributes:
        plan: its answer.
        read: the attributes of the view that it read.
        changed: those that it changed in place.
        modes: what it changed of the whole process.
    """

    plan: Plan | None
    read: frozenset[str]
    changed: list[str]
    modes: list[str]


class Trial(NamedTuple):
    """One forward pass: what the strategy was asked, what the harness recorded, what came out."""

    calls: list[Call]
    acting: Pass
    outputs: Tensor


class Runner(StandIn):
    """A strategy on a case's network, made anew from its parameters and observed.

    Attributes:
        calls: all questions to the strategy so far.
    """

    def __init__(self, strategy: Strategy, case: Case, rate: float = 0.5):
        super().__init__(fresh(strategy))
        self.case, self.calls = case, list[Call]()
        self.actor = actor_on(self, case, Budget(keep_rate=rate))

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Ask the strategy, check its plan, and note what it did."""
        spy, before = _Spy(view), modes()
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
        read, changed = frozenset(spy.__dict__["read"]), spy.changes()
        self.calls.append(Call(plan, read, changed, differences(before, modes())))
        return plan

    def fit(self, images: Images, network: FrozenNetwork) -> Any:
        """Let the strategy fit, and note what it did."""
        before = modes()
        learned = self.strategy.fit(images, network)
        self.calls.append(Call(None, frozenset(), [], differences(before, modes())))
        return learned

    def __call__(self, rows: slice | None = None, *, inputs: Tensor | None = None, training: bool = False) -> Trial:
        """Return what a pass over some rows of the case gives; without gradients unless in training.

        A strategy that acts in training only is told that it is training in any case.
        """
        rows = rows or slice(None)
        relevance = self.case.relevance[rows] if self.strategy.kind == "oracle" else None
        items = torch.arange(len(self.case.inputs))[rows]
        in_training = training or self.strategy.trains_only
        acting = self.actor.begin(items, 0, relevance, training=in_training)
        begun = len(self.calls)
        with torch.set_grad_enabled(training):
            outputs = self.case.network((self.case.inputs if inputs is None else inputs)[rows], acting)
        return Trial(self.calls[begun:], acting, outputs)


class Counted(Runner):
    """Adds up the MACs that torch counts while a strategy's plans are made, without the fields that it reads."""

    macs = 0.0

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Ask the strategy, and count."""
        for name in self.strategy.reads():
            getattr(view, name)
        with FlopCounterMode(display=False) as counter:
            plan = self.strategy.plan(view, keep)
        self.macs += counter.get_total_flops() / 2
        return plan


class Compiled(Runner):
    """Makes the first choice of a strategy by way of torch.compile, too."""

    answer = ""

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Ask the strategy, the first time compiled."""
        import torch._dynamo  # takes longer than all other checks together

        if not self.answer:
            torch._dynamo.reset()
            try:
                torch.compile(lambda: tensors(self.strategy.plan(view, keep)), backend="eager", fullgraph=True)()
                self.answer = "yes"
            except Exception as error:
                self.answer = f"no: {str(error).strip().partition(chr(10))[0][:200]}"
        return self.strategy.plan(view, keep)


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


def choices(calls: Iterable[Call]) -> list[Tensor]:
    """Return all tensors of all plans, in order."""
    return [value.detach() for call in calls for value in tensors(call.plan)]


def fresh(strategy: S) -> S:
    """Return the strategy made anew from its parameters, without what it may have remembered."""
    return type(strategy).model_validate(strategy.model_dump())


def act(strategy: Strategy, case: Case, rate: float = 0.5, rows: slice | None = None) -> Trial:
    """Return one pass of a fresh strategy over a case."""
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


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Say whether two tensors are equal bit for bit (NaN equals NaN), or both None."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)))


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """Say whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
