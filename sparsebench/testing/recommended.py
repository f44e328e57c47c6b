"""What a good strategy does besides, and what is worth knowing of it: checks by name, as in `required`."""

from __future__ import annotations

import math
import pickle
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.export import first_cause, never_exported
from sparsebench.errors import UnsupportedError
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.contract import place_of
from sparsebench.strategy.plans import Keep, Merge, Mix, Plan
from sparsebench.strategy.view import TokenView
from sparsebench.testing.networks import Case, build, cached, images_for, tiny
from sparsebench.testing.trial import RuleError, Runner, Trial, act, actor_on, alike, fresh, on_each, same, tensors
from sparsebench.training.fit import modules_of
from sparsebench.training.loop import patches_in

DEEP = ("class token", "no class token")
FAKE = torch.device("cuda", 0)
"""Where fake tensors lie; no GPU need be there."""
READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
"""What waits for a GPU."""


def has_a_docstring(strategy: Strategy) -> None:
    """The class says in a docstring what it does: `sparsebench list` and `show` print it."""
    if not (type(strategy).__dict__.get("__doc__") or "").strip():
        raise RuleError("the class has no docstring")


def pickles_by_reference(strategy: Strategy) -> None:
    """The class is found again by its module and name, and an instance comes back equal."""
    cls, again = pickle.loads(pickle.dumps((type(strategy), strategy)))
    if cls is not type(strategy) or again != strategy:
        raise RuleError("what was pickled comes back as something else")


def each_sample_on_its_own(strategy: Strategy) -> str:
    """A sample alone and in a batch has the same tokens kept."""

    def do(case: Case) -> None:
        together = act(strategy, case)
        for i in range(len(case.inputs)):
            alone = act(strategy, case, rows=slice(i, i + 1))
            if not alike(_where(alone), [after[i : i + 1] for after in _where(together)]):
                raise RuleError("the choice for a sample depends on the others of its batch")

    return on_each(do)


def _where(trial: Trial) -> list[Tensor]:
    """Return for each decision what the tokens after it are, as integers or booleans."""
    found = []
    for decision in trial.acting.decisions:
        if isinstance(decision.plan, Merge):
            found.append(decision.plan.target)
        elif isinstance(decision.plan, Mix):
            found.append(decision.plan.weight > 0)
        else:
            found.append(patches_in(decision.after, trial.acting.count))
    return found


def fifth_batch_as_first(strategy: Strategy) -> str:
    """What it did before changes nothing: five batches, of one kind and of others, and the same choice again."""

    def do(case: Case) -> None:
        runner = Runner(strategy, case)
        first = runner()
        for visit in range(2, 6):
            runner(slice(0, 1), inputs=case.inputs.flip(0))
            now = runner()
            if not alike(_where(first), _where(now)) or not same(first.outputs, now.outputs):
                raise RuleError(f"at visit {visit} it chooses otherwise than at the first: it keeps a state")

    return on_each(do)


def acts_in_bfloat16(strategy: Strategy) -> str:
    """It acts, with finite outputs, on a network in bfloat16 by autocast."""

    def do(case: Case) -> None:
        halved = images_for(case.name, build(case.name).network.module, precision="bfloat16")
        outputs = Runner(strategy, halved)().outputs
        if not bool(outputs.isfinite().all()):
            raise RuleError("the outputs are not finite")

    return on_each(do, DEEP)


def order_of_tokens_does_not_matter(strategy: Strategy) -> str:
    """Tokens in another order, each with its position embedding, give the same logits, unless it looks at places."""

    def do(case: Case) -> None:
        trial = act(strategy, case)
        for name in ("grid", "index", "random"):
            if any(name in asked.read for asked in trial.asked):
                raise UnsupportedError(f"it reads view.{name}, so places may matter to it")
        order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(2))
        network: Any = build(case.name).network
        shuffled, P = network.module, network.prefix
        with torch.no_grad():
            shuffled.pos_embed[:, P:] = shuffled.pos_embed[:, P:][:, order]
        moved = images_for(case.name, shuffled)
        outputs = Runner(strategy, moved)(inputs=_reorder(case, order)).outputs
        worst = float((outputs - trial.outputs).abs().max())
        if worst > 1e-3 * max(1.0, float(trial.outputs.abs().max())):
            raise RuleError(f"the logits differ by {worst:.1e}")

    return on_each(do, DEEP)


def _reorder(case: Case, order: Tensor) -> Tensor:
    """Return the images with their patches in another order."""
    network: Any = case.network
    (rows, columns), (height, width) = network.grid, network.patch
    B, c = case.inputs.shape[:2]
    cut = case.inputs.reshape(B, c, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    whole = cut.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return whole.reshape(case.inputs.shape)


def merged_sizes_sum_to_all(strategy: Strategy) -> str:
    """What it merges or fuses, token for token, stands for all patches there were."""

    def do(case: Case) -> None:
        trial = act(strategy, case)
        plans = [decision.plan for decision in trial.acting.decisions]
        if not plans or not all(_merges_all(plan) for plan in plans):
            raise UnsupportedError("it does not merge, or drops tokens too")
        sums = trial.acting.sizes.sum(dim=1)
        if bool(((sums - case.tokens).abs() > 1e-4 * case.tokens).any()):
            raise RuleError(f"sizes sum to {sums.tolist()}, not to {case.tokens}")

    return on_each(do)


def _merges_all(plan: Any) -> bool:
    if isinstance(plan, Keep):
        return plan.fuse is not None
    return isinstance(plan, Merge) and bool((plan.target >= 0).all())


def macs_fall_with_the_budget(strategy: Strategy) -> str:
    """The fewer tokens may stay, the fewer MACs are spent, and at last fewer than by the dense network."""
    if not strategy.budgeted:
        raise UnsupportedError("it spends the same whatever the budget (budgeted = False)")

    def do(case: Case) -> None:
        cost, rates = case.network.cost, (0.9, 0.7, 0.5, 0.3, 0.1)
        spent = [float(np.mean(cost.macs(act(strategy, case, rate).acting.steps))) for rate in rates]
        dense = cost.macs(act(strategy, case, 1.0).acting.steps)
        if strategy.trained and strategy.adaptive and len(set(spent)) == 1:
            raise UnsupportedError("it follows no counts: how much it spends it learns from its loss")
        if spent != sorted(spent, reverse=True) or len(set(spent)) == 1:
            raise RuleError(f"MACs at keep rates {rates}: {', '.join(f'{x:,.0f}' for x in spent)}")
        if spent[-1] >= dense:
            raise RuleError(f"at a keep rate of 0.1 it spends {spent[-1]:,.0f} MACs, the dense network {dense:,.0f}")

    return on_each(do, ("class token", "no class token", "one layer"))


UNDERSTATED = 0.02
"""By how much a choice may cost more than the strategy says."""


class _Counted(Runner):
    """Adds up the MACs that torch counts while a strategy's plans are made, without the fields that it reads."""

    macs = 0.0

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        for name in self.strategy.reads():
            getattr(view, name)
        with FlopCounterMode(display=False) as counter:
            plan = self.strategy.plan(view, keep)
        self.macs += counter.get_total_flops() / 2
        return plan


def own_macs_are_all(strategy: Strategy) -> None:
    """A choice costs no more MACs than `own_macs` says, as torch's FlopCounterMode counts them."""

    def do(case: Case) -> None:
        counted = _Counted(strategy, case)
        steps = counted(slice(0, 1)).acting.steps  # of one image: rows of several may be filled up
        said = sum(float(np.sum(step.own)) for step in steps)
        if counted.macs > said * (1 + UNDERSTATED):
            raise RuleError(f"its choices cost {counted.macs:,.0f} MACs an image, and own_macs says {said:,.0f}")

    on_each(do)


def gradients_flow(strategy: Strategy) -> str:
    """In training each weight of the dense network, and each that is learned, has a finite gradient that is not 0."""

    def gradients(case: Case, rate: float) -> dict[str, Tensor | None]:
        runner = Runner(strategy, case, rate)
        trial = runner(training=True)
        loss = trial.outputs.square().sum()
        (loss + trial.acting.loss() if trial.acting.learns and trial.asked else loss).backward()
        learned = modules_of(runner.actor)
        modules = {"": case.network.module, "learned.": learned}
        named = ((prefix + name, w) for prefix, one in modules.items() for name, w in one.named_parameters())
        return {name: w.grad for name, w in named if w.requires_grad}

    def do(shared: Case) -> None:
        dense = gradients(build(shared.name), 1.0)
        reduced = gradients(build(shared.name), 0.5)
        for name, now in reduced.items():
            first = dense[name]
            if not name.startswith("learned.") and (first is None or not bool(first.any())):
                continue
            if now is None or not bool(now.any()) or not bool(now.isfinite().all()):
                raise RuleError(f"the gradient of '{name}' is missing, zero or not finite")

    return on_each(do, ("class token", "no class token", "one layer"))


def stays_on_its_device(strategy: Strategy) -> str:
    """On a GPU, in the test and in training, it mixes no devices and, unless adaptive, reads no number back.

    It is tried without one, with tensors that have shapes and a device alone.
    """
    for n, training in product((1, 7), (False, True)):
        try:
            _on_fake_gpu(strategy, n, training)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if strategy.adaptive:
                return f"adaptive: it waits for the device {_reads(strategy)} times a place to read counts"
            raise RuleError(
                f"it reads numbers back from the device, which is waited for{place_of(error, strategy)}"
            ) from error
        except FakeTensorDeviceMismatchError as error:
            raise RuleError(f"it mixes tensors of the CPU and the GPU{place_of(error, strategy)}") from error
    return ""


def _on_fake_gpu(strategy: Strategy, n: int, training: bool) -> None:
    """Pass n images through a network on a GPU that is not there; in training up to the loss."""
    case = images_for("class token", tiny(), n)
    actor = actor_on(fresh(strategy), case, Budget(keep_rate=0.5))

    def go(images: Tensor, relevance: Tensor) -> None:
        shown = relevance if strategy.kind == "oracle" else None
        items = torch.arange(n, device=images.device)
        acting = actor.begin(items, 0, shown, tokens=actor.tokens, training=training or strategy.trains_only)
        with torch.set_grad_enabled(training):
            case.network(images, acting)
            if training and acting.learns:
                acting.loss()

    go(case.inputs, case.relevance)  # on the CPU, where numbers of the first plan of each shape are read
    with FakeTensorMode():
        for module in (case.network.module, modules_of(actor)):
            for part in module.modules():
                for name, weight in part.named_parameters(recurse=False):
                    fake = torch.empty(weight.shape, dtype=weight.dtype, device=FAKE)
                    weight = nn.Parameter(fake, requires_grad=weight.requires_grad)
                    part.register_parameter(name, weight)
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=FAKE))
        go(torch.empty(case.inputs.shape, device=FAKE), torch.empty(case.relevance.shape, device=FAKE))


def _reads(strategy: Strategy) -> int:
    """Return how many numbers are read of tensors for a place at which a strategy acts, the most of any pass."""
    case = images_for("class token", tiny(), 7)
    actor, most = actor_on(fresh(strategy), case, Budget(keep_rate=0.5)), 0.0
    for training in (False, True):
        counter = _Reads()
        with counter, torch.set_grad_enabled(training):
            acting = actor.begin(torch.arange(7), 0, None, tokens=actor.tokens, training=training)
            case.network(case.inputs, acting)
        most = max(most, counter.count / max(1, len(actor.keep)))
    return math.ceil(most)


class _Reads(TorchDispatchMode):
    """Counts the numbers, and the shapes that hang on numbers, that are read of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in READS
        return func(*args, **(kwargs or {}))


CHECKS = (
    has_a_docstring, pickles_by_reference, each_sample_on_its_own, fifth_batch_as_first, acts_in_bfloat16,
    order_of_tokens_does_not_matter, merged_sizes_sum_to_all, macs_fall_with_the_budget, own_macs_are_all,
    gradients_flow, stays_on_its_device,
)  # fmt: skip


class _Compiled(Runner):
    """Makes the first choice of a strategy by way of torch.compile, too."""

    answer = ""

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        import torch._dynamo  # takes longer than all other checks together

        if not self.answer:
            torch._dynamo.reset()
            try:
                torch.compile(lambda: tensors(self.strategy.plan(view, keep)), backend="eager", fullgraph=True)()
                self.answer = "yes"
            except Exception as error:
                self.answer = f"no: {str(error).strip().partition(chr(10))[0][:200]}"
        return self.strategy.plan(view, keep)


def compiles_a_choice(strategy: Strategy) -> str:
    """Whether torch.compile takes a choice without a graph break."""
    compiled = _Compiled(strategy, cached("class token"))
    compiled()
    return compiled.answer


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


INFORMATIVE = (compiles_a_choice, exports)
"""They return in words what they found, and break no rule."""
