"""The conformance checks. Each takes a strategy, or a strategy and a tiny network with data, and may return a remark.

Every strategy must pass the required checks. A good strategy also passes the recommended checks. Informative checks
measure something that authors should know.

Raises (all checks):
    RuleError: the strategy breaks the rule in the first line of the docstring; any other error also means this.
    UnsupportedError: the strategy cannot act on the network, or there is nothing to check.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils.flop_counter import FlopCounterMode

from sparsebench import __version__, seeds
from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.export import export_obstacle, first_cause
from sparsebench.errors import StrategyError, UnsupportedError, one_line, text_of, unknown
from sparsebench.measure.cost import VitCost
from sparsebench.measure.schedule import TokenSchedule, blocks_text, last_block
from sparsebench.records.record import Origin
from sparsebench.records.reports import GROUPS, Group, Outcome, Report, Status
from sparsebench.strategy.base import Strategy, complaint, place_of
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Merge, Mix, Plan
from sparsebench.strategy.view import NEEDS, TokenView
from sparsebench.testing.networks import SIZES, USUAL, Case, build, cached, images_for, tiny
from sparsebench.testing.trial import (
    CHECKS,
    Reads,
    RuleError,
    Runner,
    act,
    actor_on,
    alike,
    check,
    choices,
    differences,
    fresh,
    tensors,
)
from sparsebench.training.evaluation import evaluate, patches_in, same
from sparsebench.training.fit import modules_of, state_digest
from sparsebench.training.steps import Autograd, Samples

DEPTHS = (5, 12)
"""Numbers of blocks of the networks in which default schedules are examined: those of our suites, and ViT-S."""
BATCHES = 4
"""Number of batches in checks for side effects."""
DEEP = ("class token", "no class token")
PLAIN = (*DEEP, "one layer")
IN_RUNS = (*DEEP, "36 patches", "one layer")
UNDERSTATED = 0.02
"""The share by which the MACs of a choice may exceed `own_macs`."""
FAKE = torch.device("cuda", 0)
"""The device of fake tensors; no GPU is needed."""
TWO_DEVICES = ("at least two devices", "two different devices")
"""Words of torch's error, in new and old versions, if a function gets fake tensors of two devices."""


@check("required")
def declares_itself(strategy: Strategy) -> None:
    """Name, kind, site and needs are legal, and only an oracle asks for the relevance mask."""
    if problem := complaint(type(strategy)):
        raise RuleError(problem)
    if extra := sorted(set(strategy.requires()) - NEEDS):
        raise RuleError(f"requires() asks for {', '.join(extra)}; allowed: {', '.join(sorted(NEEDS))}")
    if "relevance" in strategy.requires() and strategy.kind != "oracle":
        raise RuleError(f"requires() asks for the relevance mask, so kind must be 'oracle', not '{strategy.kind}'")


@check("required")
def constructs_with_defaults(strategy: Strategy) -> None:
    """Every parameter has a default."""
    type(strategy)()


@check("required")
def parameters_survive_json(strategy: Strategy) -> None:
    """The parameters are the same after they are written as JSON, as in records, and read again."""
    again = type(strategy).model_validate_json(strategy.model_dump_json())
    if again.model_dump() != strategy.model_dump():
        raise RuleError(f"written {strategy.model_dump()}, read {again.model_dump()}")


@check("required", USUAL)
def fits_on_images(strategy: Strategy, case: Case) -> str:
    """`fit` returns tensors with the names and shapes of those of `module`, the same ones each time."""
    if not strategy.fits():
        return "it has no fit"
    first, second = (modules_of(Runner(strategy, case).actor).state_dict() for _ in range(2))
    if changed := [name for name, value in first.items() if not same(value, second[name])]:
        raise RuleError(f"fit returned a different '{changed[0]}' for the same images")
    return ""


@check("required", USUAL, alone=True)
def acts_without_error(strategy: Strategy, case: Case) -> None:
    """It acts on at least one tiny network, batch after batch, and raises no error except UnsupportedError."""
    try:
        runner = Runner(strategy, case)
        for _ in range(BATCHES):
            runner()
    except (RuleError, UnsupportedError):
        raise
    except StrategyError as error:
        raise RuleError(str(error)) from error
    except Exception as error:
        raise RuleError(f"the network fails after its plan: {one_line(error)}") from error


@check("required", USUAL, alone=True)
def reads_no_relevance(strategy: Strategy, case: Case) -> str:
    """Only an oracle reads the relevance mask; for other strategies this raises an error."""
    if strategy.kind == "oracle":
        return "it is an oracle"
    act(strategy, case)
    return ""


@check("required", USUAL, alone=True)
def plans_are_legal(strategy: Strategy, case: Case) -> str:
    """Plans are legal, contain no NaN, and leave as many tokens as the budget says, from one token to all but one."""
    for rate in (1 / case.tokens, 0.5, 1 - 1 / max(2, case.tokens)):
        runner = act(strategy, case, rate)
        planned = [step.tokens_out for step in runner.actor.planned]
        realised = [step.tokens_out for step in runner.acting.steps]
        if strategy.budgeted and not strategy.adaptive and realised != planned:
            raise RuleError(f"tokens after each block: planned {planned}, realised {realised}")
        if not bool(runner.outputs.isfinite().all()):
            raise RuleError("the network's outputs are not finite")
    if strategy.adaptive:
        return "its token counts need not be those of the budget (adaptive = True)"
    return "" if strategy.budgeted else "its MACs do not depend on the budget (budgeted = False)"


@check("required", USUAL)
def keep_all_is_dense(strategy: Strategy, case: Case) -> None:
    """If all tokens stay, also after it has removed tokens, the logits are those of the dense network, to 1e-6."""
    with torch.no_grad():
        dense = case.network(case.inputs)
    act(strategy, case, 0.5)
    kept = act(strategy, case, 1.0).outputs
    with torch.no_grad():
        after = case.network(case.inputs)
    worst = max(float((x - dense).abs().max()) for x in (kept, after))
    if worst > 1e-6 * max(1.0, float(dense.abs().max())):
        raise RuleError(f"logits differ by {worst:.1e}")


@check("required", USUAL)
def same_seed_same_bits(strategy: Strategy, case: Case) -> None:
    """Two fresh instances make the same choices, bit for bit."""

    def run() -> list[Tensor]:
        runner = act(strategy, case)
        return [*choices(runner.plans), runner.outputs]

    _require_repeatable(run)


def _require_repeatable(run: Callable[[], list[Tensor]]) -> None:
    """Raise RuleError if two equal runs differ. Then a run with something changed shows nothing of its effect."""
    first = run()
    torch.rand(3), np.random.rand(), random.random()
    if not alike(first, run()):
        raise RuleError("two runs differ; draw random numbers with view.random()", "same_seed_same_bits")


@check("required", SIZES)
def odd_sizes(strategy: Strategy, case: Case) -> None:
    """It acts on an odd number of tokens, a grid that is not square, a single token and a single sample."""
    for rate in (1 / case.tokens, 0.5, 1 - 1 / max(2, case.tokens)):
        for rows in (slice(0, 1), slice(None)):
            act(strategy, case, rate, rows)


@check("required", IN_RUNS)
def labels_change_nothing(strategy: Strategy, case: Case) -> None:
    """Other labels do not change its choices in a training step and in the test."""
    relabelled = replace(case, labels=case.labels.roll(1))
    if not alike(_in_a_run(strategy, case), _in_a_run(strategy, relabelled)):
        _require_repeatable(lambda: _in_a_run(strategy, case))
        raise RuleError("the choice depends on the labels")


@check("required", IN_RUNS)
def relevance_changes_nothing(strategy: Strategy, case: Case) -> str:
    """Unless it is an oracle, another relevance mask does not change its choices in a training step and in the test."""
    if strategy.kind == "oracle":
        return "it is an oracle"
    changed = replace(case, relevance=case.relevance.roll(1, 0))
    if not alike(_in_a_run(strategy, case), _in_a_run(strategy, changed)):
        _require_repeatable(lambda: _in_a_run(strategy, case))
        raise RuleError("the choice depends on the relevance mask")
    return ""


def _in_a_run(strategy: Strategy, case: Case) -> list[Tensor]:
    """Return all choices in a test and then in a training step, on a new network."""
    network = build(case.name).network
    runner = Runner(strategy, replace(case, network=network))
    samples = Samples(case.inputs, case.labels, case.relevance)
    evaluate(network, runner.actor, samples, case.recipe)
    steps = Autograd(network, runner.actor, samples, case.recipe)
    with torch.enable_grad():
        steps.step(np.arange(len(case.labels)), 0, 0.0)
    return choices(runner.plans)


@check("required", USUAL)
def view_is_left_alone(strategy: Strategy, case: Case) -> None:
    """It changes no tensor of its view in place, because the network uses them afterwards."""
    if changed := sorted(_batches(strategy, case).changed):
        raise RuleError(f"changed in place: {', '.join(f'view.{name}' for name in changed)}")


@check("required", USUAL)
def model_is_left_alone(strategy: Strategy, case: Case) -> None:
    """It does not change weights, hooks and forward methods of the model."""

    def state(module: nn.Module) -> dict[str, Any]:
        parts: dict[str, Any] = {"weights": state_digest(module.state_dict())}
        for name, part in module.named_modules():
            hooks = [len(value) for attribute, value in vars(part).items() if attribute.endswith("_hooks")]
            parts[f"hooks or forward of '{name}'"] = type(part).forward, vars(part).get("forward"), hooks
        return parts

    case = build(case.name)
    before = state(case.network.module)
    _batches(strategy, case)
    if changed := sorted(differences(before, state(case.network.module))):
        raise RuleError(f"changed: {', '.join(changed)}")


@check("required", USUAL)
def random_state_is_left_alone(strategy: Strategy, case: Case) -> None:
    """It does not change the global random states of torch, numpy and Python."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(20_250_101)
    before = seeds.global_states()
    _batches(strategy, case)
    if changed := sorted(differences(before, seeds.global_states())):
        raise RuleError(f"changed: the global random state of {', '.join(changed)}; use view.random()")


@check("required", USUAL)
def modes_are_left_alone(strategy: Strategy, case: Case) -> None:
    """It does not change torch's gradient mode, default dtype and number of threads, also in training."""
    for training in (False, True):
        with torch.set_grad_enabled(training):
            runner = Runner(strategy, case)(training=training)
        if changed := sorted(runner.modes):
            raise RuleError(f"changed: {', '.join(changed)}")


def _batches(strategy: Strategy, case: Case) -> Runner:
    """Return a strategy after a few batches, the last of them in training."""
    runner = Runner(strategy, case)
    for _ in range(BATCHES):
        runner()
    runner(training=True)
    return runner


@check("recommended")
def has_a_docstring(strategy: Strategy) -> None:
    """The class has a docstring, which `sparsebench list` and `show` print."""
    if not (type(strategy).__dict__.get("__doc__") or "").strip():
        raise RuleError("the class has no docstring")


@check("recommended")
def pickles_by_reference(strategy: Strategy) -> None:
    """The class can be imported by its module and name, and an instance is equal to its pickled copy."""
    cls, again = pickle.loads(pickle.dumps((type(strategy), strategy)))
    if cls is not type(strategy) or again != strategy:
        raise RuleError("the pickled copy is different")


@check("recommended", USUAL)
def each_sample_on_its_own(strategy: Strategy, case: Case) -> None:
    """It keeps the same tokens of a sample alone and in a batch."""
    together = _where(act(strategy, case))
    for i in range(len(case.inputs)):
        alone = _where(act(strategy, case, rows=slice(i, i + 1)))
        if not alike(alone, [after[i : i + 1] for after in together]):
            _require_repeatable(lambda: _where(act(strategy, case)))
            raise RuleError("the choice for a sample depends on other samples of the batch")


def _where(runner: Runner) -> list[Tensor]:
    """Return integers or booleans that identify the new tokens after each decision of the last pass."""
    places = []
    for decision in runner.acting.decisions:
        if isinstance(decision.plan, Merge):
            places.append(decision.plan.target)
        elif isinstance(decision.plan, Mix):
            places.append(decision.plan.weight > 0)
        else:
            places.append(patches_in(decision.after, runner.acting.count))
    return places


@check("recommended", USUAL)
def fifth_batch_as_first(strategy: Strategy, case: Case) -> None:
    """Earlier batches do not change its choices: a batch has the same choices five times, with others in between."""
    runner = Runner(strategy, case)
    first = [*_where(runner()), runner.outputs]
    for visit in range(2, 6):
        runner(slice(0, 1), inputs=case.inputs.flip(0))
        if not alike(first, [*_where(runner()), runner.outputs]):
            _require_repeatable(lambda: _where(act(strategy, case)))
            raise RuleError(f"the choices for a batch are different at time {visit}: it keeps a state")


@check("recommended", DEEP)
def acts_in_bfloat16(strategy: Strategy, case: Case) -> None:
    """It acts on a network under autocast to bfloat16, with finite outputs."""
    halved = images_for(case.name, build(case.name).network.module, precision="bfloat16")
    if not bool(Runner(strategy, halved)().outputs.isfinite().all()):
        raise RuleError("the outputs are not finite")


@check("recommended", DEEP)
def order_of_tokens_does_not_matter(strategy: Strategy, case: Case) -> None:
    """Tokens in another order, each with its position embedding, give the same logits, unless it reads positions."""
    usual = act(strategy, case)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(2))
    network: Any = build(case.name).network
    shuffled, P = network.module, network.prefix
    with torch.no_grad():
        shuffled.pos_embed[:, P:] = shuffled.pos_embed[:, P:][:, order]
    moved = images_for(case.name, shuffled)
    outputs = Runner(strategy, moved)(inputs=_reorder(case, order)).outputs
    worst = float((outputs - usual.outputs).abs().max())
    if worst <= 1e-3 * max(1.0, float(usual.outputs.abs().max())):
        return

    positions = [f"view.{name}" for name in ("grid", "index", "random") if name in usual.read]
    declares_it = order_of_tokens_does_not_matter.__name__ in expected_failures(strategy)
    if positions and not declares_it:
        raise UnsupportedError(
            f"the logits differ by {worst:.1e}, but it reads {' and '.join(positions)}: its choices may depend on "
            "positions"
        )
    _require_repeatable(lambda: _where(act(strategy, case)))
    raise RuleError(f"the logits differ by {worst:.1e}")


def _reorder(case: Case, order: Tensor) -> Tensor:
    """Return the images with their patches in another order."""
    network: Any = case.network
    (rows, columns), (height, width) = network.grid, network.patch
    B, c = case.inputs.shape[:2]
    cut = case.inputs.reshape(B, c, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    whole = cut.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return whole.reshape(case.inputs.shape)


@check("recommended", PLAIN)
def macs_fall_with_the_budget(strategy: Strategy, case: Case) -> None:
    """Its MACs fall with the keep rate, and at the lowest keep rate are below those of the dense network."""
    if not strategy.budgeted:
        raise UnsupportedError("its MACs do not depend on the budget (budgeted = False)")
    cost, rates = case.network.cost, (0.9, 0.7, 0.5, 0.3, 0.1)
    spent = [float(np.mean(cost.macs(act(strategy, case, rate).acting.steps))) for rate in rates]
    dense = cost.macs(act(strategy, case, 1.0).acting.steps)
    if strategy.trained and strategy.adaptive and len(set(spent)) == 1:
        raise UnsupportedError("its token counts are learned from its loss, not set by the budget")
    if spent != sorted(spent, reverse=True) or len(set(spent)) == 1:
        raise RuleError(f"MACs at keep rates {rates}: {', '.join(f'{x:,.0f}' for x in spent)}")
    if spent[-1] >= dense:
        raise RuleError(f"at a keep rate of 0.1 it spends {spent[-1]:,.0f} MACs, the dense network {dense:,.0f}")


@check("recommended", USUAL)
def own_macs_are_all(strategy: Strategy, case: Case) -> None:
    """A choice costs no more MACs, counted by torch's FlopCounterMode, than `own_macs` returns."""
    macs = 0.0

    def ask(strategy: Strategy, view: TokenView, keep: int) -> Plan | None:
        nonlocal macs
        for name in strategy.reads():  # before counting: fields are part of the network's MACs
            getattr(view, name)
        with FlopCounterMode(display=False) as counter:
            plan = strategy.plan(view, keep)
        macs += counter.get_total_flops() / 2
        return plan

    steps = Runner(strategy, case, ask=ask)(slice(0, 1)).acting.steps  # one image, so that there is no padding
    limit = sum(float(np.sum(step.own)) for step in steps)
    if macs > limit * (1 + UNDERSTATED):
        raise RuleError(f"its choices cost {macs:,.0f} MACs per image, but own_macs returns {limit:,.0f}")


@check("recommended", PLAIN)
def gradients_flow(strategy: Strategy, case: Case) -> None:
    """In training each weight of the dense network and of the strategy has a finite, nonzero gradient."""

    def gradients(case: Case, rate: float) -> dict[str, Tensor | None]:
        runner = Runner(strategy, case, rate)(training=True)
        loss = runner.outputs.square().sum()
        for logits in runner.acting.auxiliary() if runner.plans else ():
            loss = loss + logits.square().sum()
        (loss + runner.acting.loss() if runner.acting.learns and runner.plans else loss).backward()
        learned = modules_of(runner.actor)
        modules = {"": case.network.module, "learned.": learned}
        weights = ((prefix + name, w) for prefix, module in modules.items() for name, w in module.named_parameters())
        return {name: w.grad for name, w in weights if w.requires_grad}

    dense = gradients(build(case.name), 1.0)
    for name, gradient in gradients(build(case.name), 0.5).items():
        reference = dense[name]
        if not name.startswith("learned.") and (reference is None or not bool(reference.any())):
            continue
        if gradient is None or not bool(gradient.any()) or not bool(gradient.isfinite().all()):
            raise RuleError(f"the gradient of '{name}' is missing, zero or not finite")


@check("recommended")
def stays_on_its_device(strategy: Strategy) -> str:
    """On a GPU, in the test and in training, it mixes no devices and, unless adaptive, reads no number back.

    No GPU is needed: fake tensors have only shapes and a device. The CUDA build of torch 2.9 does need one.
    """
    for n, training in product((1, 7), (False, True)):
        try:
            _on_fake_gpu(strategy, n, training)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if strategy.adaptive:
                return f"adaptive: it waits for the device {_reads(strategy)} times per block to read counts"
            raise RuleError(
                f"it reads numbers back from the device, which makes the CPU wait{place_of(error, strategy)}"
            ) from error
        except torch.AcceleratorError as error:
            raise UnsupportedError("this version of torch cannot imitate a GPU on a machine without one") from error
        except RuntimeError as error:
            if not any(words in str(error) for words in TWO_DEVICES):
                raise
            raise RuleError(f"it mixes tensors of the CPU and the GPU{place_of(error, strategy)}") from error
    return ""


def _on_fake_gpu(strategy: Strategy, n: int, training: bool) -> None:
    """Pass n images through a network on a fake GPU; in training up to the loss."""
    case = images_for("class token", tiny(), n)
    actor = actor_on(fresh(strategy), case, Budget(keep_rate=0.5))

    def forward(images: Tensor, relevance: Tensor) -> None:
        mask = relevance if strategy.kind == "oracle" else None
        items = torch.arange(n, device=images.device)
        acting = actor.begin(items, 0, mask, training=training or strategy.trains_only)
        with torch.set_grad_enabled(training):
            case.network(images, acting)
            if training and acting.learns:
                acting.loss()
            acting.auxiliary()

    forward(case.inputs, case.relevance)  # on the CPU, because the first plan of each shape is read and checked
    with FakeTensorMode():
        for module in (case.network.module, modules_of(actor)):
            for part in module.modules():
                for name, weight in part.named_parameters(recurse=False):
                    fake = torch.empty(weight.shape, dtype=weight.dtype, device=FAKE)
                    weight = nn.Parameter(fake, requires_grad=weight.requires_grad)
                    part.register_parameter(name, weight)
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=FAKE))
        forward(torch.empty(case.inputs.shape, device=FAKE), torch.empty(case.relevance.shape, device=FAKE))


def _reads(strategy: Strategy) -> int:
    """Return how many numbers are read from tensors per block in which a strategy acts, the maximum over passes."""
    case = images_for("class token", tiny(), 7)
    actor = actor_on(fresh(strategy), case, Budget(keep_rate=0.5))
    most = 0.0
    for training in (False, True):
        counter = Reads()
        with counter, torch.set_grad_enabled(training):
            acting = actor.begin(torch.arange(7), 0, None, training=training)
            case.network(case.inputs, acting)
        most = max(most, counter.count / max(1, len(actor.keep)))
    return math.ceil(most)


@check("informative")
def choices_have_an_effect(strategy: Strategy) -> str:
    """Whether the default schedule acts only where the choice of tokens can change the outputs of a class token."""
    if not strategy.budgeted:
        return "it has no budget"
    cost = cast(VitCost, cached("class token").network.cost)
    without: list[str] = []
    for depth in DEPTHS:
        network = replace(cost, blocks=cost.blocks[:1] * depth)
        last = last_block(strategy.traits(), network)
        blocks = TokenSchedule(Budget(macs=0.5), strategy.traits(), network).blocks
        if late := [block for block in blocks if block > last]:
            without.append(f"in {blocks_text(late)} of {depth}")
    if not without:
        return "yes"
    return (
        f"no: {', '.join(without)} it acts after the last attention, where a class token cannot change any more; "
        "schedule=auto leaves these blocks out"
    )


@check("informative")
def compiles_a_choice(strategy: Strategy) -> str:
    """Whether torch.compile compiles a choice without a graph break."""
    import torch._dynamo  # takes longer than all other checks together

    answers: list[str] = []

    def ask(strategy: Strategy, view: TokenView, keep: int) -> Plan | None:
        if not answers:
            torch._dynamo.reset()
            try:
                torch.compile(lambda: tensors(strategy.plan(view, keep)), backend="eager", fullgraph=True)()
                answers.append("yes")
            except Exception as error:
                answers.append(f"no: {str(error).strip().partition(chr(10))[0][:200]}")
        return strategy.plan(view, keep)

    Runner(strategy, cached("class token"), ask=ask)()
    return "".join(answers)


@check("informative")
def exports(strategy: Strategy) -> str:
    """Whether torch.export exports a network with the strategy, as `sparsebench export` does."""
    if reason := export_obstacle(type(strategy)):
        return f"no: {reason}"
    budget: dict[str, Any] = {"keep_rate": 0.7} if strategy.budgeted else {}
    model = tiny(depth=2)
    cudnn = cast(Any, torch.backends.cudnn)
    before = "tf32" in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    try:
        cudnn.allow_tf32 = False  # torch.export fails if the parts have different settings
        learned = RANDOM if strategy.trained or strategy.fits() else None
        with apply(model, fresh(strategy), learned=learned, **budget) as sparse:
            torch.export.export(sparse.eval(), (torch.zeros(1, 3, 32, 32),), strict=False)
    except Exception as error:  # torch has many types of errors for code that it cannot trace
        return f"no: {first_cause(error)[:200]}"
    finally:
        cudnn.allow_tf32 = before
    return "yes"


def expected_failures(strategy: Strategy | type[Strategy]) -> dict[str, str]:
    """Return the checks that the strategy declares to fail, each with the reason.

    Raises:
        UserError: there is no check with one of these names.
    """
    for name in strategy.expected_failures:
        if name not in CHECKS:
            raise unknown(f"check in {strategy.name}.expected_failures", name, CHECKS)
    return dict(strategy.expected_failures)


def blank(strategy: Strategy, origin: Origin, groups: Collection[Group] = GROUPS) -> Report:
    """Return the report with the checks of these groups before any is run."""
    return Report(
        strategy=strategy.name,
        params=strategy.model_dump(mode="json", exclude_defaults=True),
        kind=strategy.kind,
        site=strategy.site,
        origin=origin,
        versions={"sparsebench": __version__, "torch": torch.__version__, "timm": timm.__version__},
        outcomes=tuple(Outcome(check=c.name, group=c.group, says=c.says) for c in CHECKS.values() if c.group in groups),
    )


def outcomes(strategy: Strategy, report: Report) -> Iterator[Outcome]:
    """Run the checks of a report in order, and yield the outcome of each."""
    failed: set[str] = set()
    declared = expected_failures(strategy)
    for outcome in report.outcomes:
        start = time.perf_counter()
        reason = declared.get(outcome.check)
        status = cast(Status, "passed")
        try:
            text = CHECKS[outcome.check](strategy)
            if reason is not None:
                text = f"it passes, though it is declared to fail; {text}".rstrip("; ")
        except UnsupportedError as error:
            status, text = "unsupported", text_of(error)
        except BaseException as error:  # a strategy may raise anything
            if isinstance(error, RuleError) and error.check in failed - {outcome.check}:
                status, text = "not run", f"see {error.check}"
            else:
                failed.add(outcome.check)
                text = " ".join((text_of(error) if isinstance(error, RuleError) else one_line(error)).split())
                status, text = ("failed", text) if reason is None else ("expected", f"{reason} ({text})")
        yield outcome.after(status, text, time.perf_counter() - start)
