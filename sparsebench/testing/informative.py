"""What is worth knowing of a strategy: measurements by name. Each takes a strategy and returns in words what it found.

They are made on two blocks like those of a DeiT-Ti: width 192, 196 patches and a class token, 4 images.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.export import first_cause, never_exported
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Plan
from sparsebench.strategy.view import TokenView
from sparsebench.testing.networks import Case, build, images_for, tiny
from sparsebench.testing.trial import Choice, RuleError, Runner, actor_on, answer, fresh, on_each, tensors
from sparsebench.training.fit import StandIn

REPEATS = 5


@cache
def deit_tiny() -> Case:
    """Return the case on which choices are measured."""
    return images_for("DeiT-Ti", tiny(img_size=224, patch_size=16, embed_dim=192, depth=2, num_heads=3))


class _Within(StandIn):
    """Makes each choice of a strategy by way of `around`."""

    def __init__(self, strategy: Strategy, around: Callable[[Choice], Plan | None]):
        super().__init__(strategy)
        self.around = around

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        around = self.around
        return answer(lambda: around(lambda: self.strategy.plan(view, keep)), self.strategy, view, keep)


@torch.no_grad()
def _choose(strategy: Strategy, around: Callable[[Choice], Plan | None]) -> None:
    """Let a fresh strategy make a choice, in the last block or at the input."""
    case, within = deit_tiny(), _Within(fresh(strategy), around)
    stand_in: Any = within
    actor = actor_on(stand_in, case, Budget(keep_rate=0.7, blocks=(1,)))
    relevance = case.relevance if strategy.kind == "oracle" else None
    items = torch.arange(len(case.inputs))
    case.network(case.inputs, actor.begin(items, 0, relevance, tokens=case.tokens, training=strategy.trains_only))


def time_of_a_choice(strategy: Strategy) -> str:
    """How long a choice takes, with what is computed only for it, as a share of a block's time."""
    choices: list[float] = []
    blocks: list[float] = []

    def time_choice(choice: Choice) -> Plan | None:
        begun = time.perf_counter()
        plan = choice()
        choices.append(time.perf_counter() - begun)
        return plan

    block, x = deit_tiny().network.module.blocks[0], torch.rand(4, 197, 192)
    for _ in range(REPEATS):
        _choose(strategy, time_choice)
        begun = time.perf_counter()
        with torch.no_grad():
            block(x)
        blocks.append(time.perf_counter() - begun)
    choice, dense = statistics.median(choices), statistics.median(blocks)
    return f"{choice / dense:.1%} of a block ({1e3 * choice:.2f} of {1e3 * dense:.2f} ms)"


class _Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and still there.

    Attributes:
        peak: the most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _storage(tensor) not in given:
                self.live[id(tensor)] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, self.live.pop, id(tensor), None)
        self.peak = max(self.peak, sum(self.live.values()))
        return made


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def memory_of_a_choice(strategy: Strategy) -> str:
    """The most memory that the tensors of a choice, with what is computed only for it, take at a time."""
    counted = _Allocated()

    def measure_choice(choice: Choice) -> Plan | None:
        with counted:
            return choice()

    _choose(strategy, measure_choice)
    return f"{counted.peak / len(deit_tiny().inputs) / 1024:,.0f} KiB an image (196 patches, width 192)"


def compiles_a_choice(strategy: Strategy) -> str:
    """Whether torch.compile takes a choice without a graph break."""
    import torch._dynamo  # takes longer than all other checks together

    answers: list[str] = []

    def compile_choice(choice: Choice) -> Plan | None:
        torch._dynamo.reset()
        try:
            torch.compile(lambda: tensors(choice()), backend="eager", fullgraph=True)()
            answers.append("yes")
        except Exception as error:
            answers.append(f"no: {str(error).strip().partition(chr(10))[0][:200]}")
        return choice()

    _choose(strategy, compile_choice)
    return answers[0]


def exports(strategy: Strategy) -> str:
    """Whether torch.export takes a whole network on which it acts, as `sparsebench export` writes it."""
    if reason := never_exported(type(strategy)):
        return f"no: {reason}"
    budget: dict[str, Any] = {"keep_rate": 0.7} if strategy.budgeted else {}
    model, cudnn = tiny(depth=2), cast(Any, torch.backends.cudnn)
    before = "tf32" in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    try:
        cudnn.allow_tf32 = False  # torch.export refuses to look at parts that differ
        learned = RANDOM if strategy.trained or strategy.fits() else None
        with apply(model, fresh(strategy), learned=learned, **budget) as sparse:
            torch.export.export(sparse.eval(), (torch.zeros(1, 3, 32, 32),), strict=False)
    except Exception as error:  # torch has many of its own for what it cannot follow
        return f"no: {first_cause(error)[:200]}"
    finally:
        cudnn.allow_tf32 = before
    return "yes"


def acts_in_float16(strategy: Strategy) -> str:
    """Whether it can choose where the network's weights are float16, in which no cell is run."""

    def do(case: Case) -> None:
        half = images_for(case.name, build(case.name).network.module.half())
        runner = Runner(fresh(strategy), half)
        try:
            runner(inputs=case.inputs.half())
        except RuntimeError:  # the network's: what the strategy raises is a RuleError
            if not runner.observed.asked:
                raise

    try:
        return on_each(do, ("class token", "no class token")) or "yes"
    except RuleError as error:
        return f"no: {' '.join(str(error).split())}"


CHECKS = (time_of_a_choice, memory_of_a_choice, compiles_a_choice, exports, acts_in_float16)
