"""What every strategy must do: checks by name. Each takes a strategy and raises, or returns a remark.

Raises (all of them):
    RuleError: the strategy breaks the rule that the docstring says; so it does where another error is raised.
    UnsupportedError: the strategy can act on none of the networks that the check needs.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import StrategyError, UnsupportedError
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.contract import complaint
from sparsebench.strategy.view import NEEDS
from sparsebench.testing.networks import PREFIXES, SIZES, Case, build
from sparsebench.testing.trial import Asked, RuleError, Runner, act, alike, choices, differences, on_each, same
from sparsebench.training.fit import modules_of, state_digest
from sparsebench.training.loop import evaluate
from sparsebench.training.steps import Autograd, Samples

BATCHES = 4
"""How many batches a strategy is given where what it does besides choosing is watched."""
IN_RUNS = ("class token", "no class token", "36 patches", "one layer")


def declares_itself(strategy: Strategy) -> None:
    """Name, kind, site and needs are legal, and only an oracle asks for the relevance mask."""
    if problem := complaint(type(strategy)):
        raise RuleError(problem)
    if extra := sorted(set(strategy.requires()) - NEEDS):
        raise RuleError(f"requires() asks for {', '.join(extra)}; allowed: {', '.join(sorted(NEEDS))}")
    if "relevance" in strategy.requires() and strategy.kind != "oracle":
        raise RuleError(f"requires() asks for the relevance mask, so kind must be 'oracle', not '{strategy.kind}'")


def constructs_with_defaults(strategy: Strategy) -> None:
    """Every parameter has a default."""
    type(strategy)()


def parameters_survive_json(strategy: Strategy) -> None:
    """Written as JSON and read again, the parameters are the same: records hold them so."""
    again = type(strategy).model_validate_json(strategy.model_dump_json())
    if again.model_dump() != strategy.model_dump():
        raise RuleError(f"written {strategy.model_dump()}, read {again.model_dump()}")


def fits_on_images(strategy: Strategy) -> str:
    """What it learns from training images has the form that its module has, and is the same each time."""
    if not strategy.fits():
        return "it has no fit"

    def do(case: Case) -> None:
        first, second = (modules_of(Runner(strategy, case).actor).state_dict() for _ in range(2))
        if other := [name for name, value in first.items() if not same(value, second[name])]:
            raise RuleError(f"it learned another {other[0]} from the same images")

    return on_each(do)


def acts_without_error(strategy: Strategy) -> str:
    """It acts on a tiny network at least, batch after batch, and raises nothing but UnsupportedError."""

    def do(case: Case) -> None:
        try:
            runner = Runner(strategy, case)
            for _ in range(BATCHES):
                runner()
        except (RuleError, UnsupportedError):
            raise
        except StrategyError as error:
            raise RuleError(str(error)) from error
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise RuleError(f"the network cannot go on with its plan: {text}") from error

    try:
        return on_each(do, belongs="acts_without_error")
    except UnsupportedError as error:
        raise RuleError(f"it can act on none of the networks: {error}") from error


def reads_no_relevance(strategy: Strategy) -> str:
    """Only an oracle reads the relevance mask; for any other it raises."""
    if strategy.kind == "oracle":
        return "it is an oracle"
    return on_each(lambda case: act(strategy, case), belongs="reads_no_relevance")


def plans_are_legal(strategy: Strategy) -> str:
    """Plans are legal, hold no NaN, and let as many tokens go on as the budget says, from one token to all but one."""

    def do(case: Case) -> None:
        for rate in (1 / case.tokens, 0.5, 1 - 1 / max(2, case.tokens)):
            trial = act(strategy, case, rate)
            planned = [step.tokens_out for step in trial.acting.actor.planned]
            realised = [step.tokens_out for step in trial.acting.steps]
            if strategy.budgeted and not strategy.adaptive and realised != planned:
                raise RuleError(f"tokens after each block: planned {planned}, realised {realised}")
            if not bool(trial.outputs.isfinite().all()):
                raise RuleError("the network's outputs are not finite")

    note = on_each(do, belongs="plans_are_legal")
    if strategy.adaptive:
        return "each image keeps as many as it needs (adaptive = True)"
    return note if strategy.budgeted else "it spends the same whatever the budget (budgeted = False)"


def prefix_tokens_stay(strategy: Strategy) -> str:
    """Class, distillation and register tokens stay as they are: 0, 1, 2 and 5 of them."""

    def do(case: Case) -> None:
        network: Any = case.network
        runner = Runner(strategy, case)
        first = min(runner.actor.keep)
        block = network.module.blocks[first]
        place = block.norm2 if strategy.site == "attention" else block.norm1
        seen: list[Tensor] = []
        hook = place.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        try:
            with torch.no_grad():
                network(case.inputs)
            trial = runner()
        finally:
            hook.remove()
        P, before, after = network.prefix, seen[0], seen[-1]  # between them what it asked the network itself
        went_on = int(np.max(trial.acting.steps[first].tokens_out))
        if after.shape[1] != P + went_on or not torch.allclose(after[:, :P], before[:, :P], atol=1e-5):
            raise RuleError(f"of {P} prefix tokens and {went_on} patches, others came to block {first}")

    return on_each(do, PREFIXES)


def keep_all_is_dense(strategy: Strategy) -> str:
    """Where all tokens are to stay, also after it has acted, the logits are the bare network's to 1e-6."""

    def do(case: Case) -> None:
        with torch.no_grad():
            dense = case.network(case.inputs)
        act(strategy, case, 0.5)
        kept = act(strategy, case, 1.0).outputs
        with torch.no_grad():
            after = case.network(case.inputs)
        worst = max(float((x - dense).abs().max()) for x in (kept, after))
        if worst > 1e-6 * max(1.0, float(dense.abs().max())):
            raise RuleError(f"logits differ by {worst:.1e}")

    return on_each(do)


def same_seed_same_bits(strategy: Strategy) -> str:
    """Made and run twice, it chooses the same to the bit."""

    def do(case: Case) -> None:
        first = act(strategy, case)
        torch.rand(3), np.random.rand(), random.random()
        second = act(strategy, case)
        if not alike([*choices(first.asked), first.outputs], [*choices(second.asked), second.outputs]):
            raise RuleError("two runs differ; draw random numbers with view.random()")

    return on_each(do)


def odd_sizes(strategy: Strategy) -> str:
    """An odd number of tokens, a grid that is not square, a single token and a single sample are no trouble."""

    def do(case: Case) -> None:
        for rate in (1 / case.tokens, 0.5, 1 - 1 / max(2, case.tokens)):
            for rows in (slice(0, 1), slice(None)):
                act(strategy, case, rate, rows)

    return on_each(do, SIZES)


def labels_change_nothing(strategy: Strategy) -> str:
    """In a training step and in the test it chooses the same with other labels."""

    def do(case: Case) -> None:
        if not alike(_in_a_run(strategy, case.name, turn_labels=0), _in_a_run(strategy, case.name, turn_labels=1)):
            raise RuleError("the choice depends on the labels")

    return on_each(do, IN_RUNS)


def relevance_changes_nothing(strategy: Strategy) -> str:
    """Where it is no oracle, it chooses the same with another relevance mask, in a training step and in the test."""
    if strategy.kind == "oracle":
        return "it is an oracle"

    def do(case: Case) -> None:
        if not alike(_in_a_run(strategy, case.name, turn_mask=0), _in_a_run(strategy, case.name, turn_mask=1)):
            raise RuleError("the choice depends on the relevance mask")

    return on_each(do, IN_RUNS)


def _in_a_run(strategy: Strategy, name: str, *, turn_labels: int = 0, turn_mask: int = 0) -> list[Tensor]:
    """Return all choices of a test and a step of training, with labels or masks turned among the samples."""
    built = build(name)
    case = replace(built, labels=built.labels.roll(turn_labels), relevance=built.relevance.roll(turn_mask, 0))
    runner = Runner(strategy, case)
    samples = Samples(case.inputs, case.labels, case.relevance)
    evaluate(case.network, runner.actor, samples, case.recipe)
    steps = Autograd(case.network, runner.actor, samples, case.recipe)
    with torch.enable_grad():
        steps.step(np.arange(len(case.labels)), 0, 0.0)
    return choices(runner.asked)


def view_is_left_alone(strategy: Strategy) -> str:
    """It changes no tensor of its view in place: the network goes on with them."""

    def do(case: Case) -> None:
        changed = sorted({name for asked in _batches(strategy, case) for name in asked.changed})
        if changed:
            raise RuleError(f"changed in place: {', '.join(f'view.{name}' for name in changed)}")

    return on_each(do)


def model_is_left_alone(strategy: Strategy) -> str:
    """Weights, hooks and forward methods of the model are afterwards what they were."""

    def state(module: torch.nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {"weights": state_digest(module.state_dict())}
        for name, part in module.named_modules():
            hooks = [len(held) for kind, held in vars(part).items() if kind.endswith("_hooks")]
            found[f"hooks or forward of '{name}'"] = type(part).forward, vars(part).get("forward"), hooks
        return found

    def do(shared: Case) -> None:
        case = build(shared.name)
        module = case.network.module
        before = state(module)
        _batches(strategy, case)
        if changed := differences(before, state(module)):
            raise RuleError(f"changed: {', '.join(changed)}")

    return on_each(do)


def random_state_is_left_alone(strategy: Strategy) -> str:
    """The global random states of torch, numpy and Python are untouched."""

    def do(case: Case) -> None:
        before = seeds.global_states()
        _batches(strategy, case)
        if changed := differences(before, seeds.global_states()):
            raise RuleError(f"changed: the global random state of {', '.join(changed)}; use view.random()")

    torch.manual_seed(20_250_101)
    np.random.seed(20_250_101)
    random.seed(20_250_101)
    return on_each(do)


def modes_are_left_alone(strategy: Strategy) -> str:
    """Gradients, the default dtype and the number of threads of torch are untouched, in training too."""

    def do(case: Case) -> None:
        for training in (False, True):
            with torch.set_grad_enabled(training):
                runner = Runner(strategy, case)
                runner(training=training)
            if changed := sorted({mode for one in runner.asked for mode in one.modes}):
                raise RuleError(f"changed: {', '.join(changed)}")

    return on_each(do)


def _batches(strategy: Strategy, case: Case) -> list[Asked]:
    """Return what was asked in a few batches that one strategy is given, the last of them in training."""
    runner = Runner(strategy, case)
    for _ in range(BATCHES):
        runner()
    runner(training=True)
    return runner.asked


CHECKS = (
    declares_itself, constructs_with_defaults, parameters_survive_json, fits_on_images, acts_without_error,
    reads_no_relevance, plans_are_legal, prefix_tokens_stay, keep_all_is_dense,
    same_seed_same_bits, odd_sizes, labels_change_nothing, relevance_changes_nothing, view_is_left_alone,
    model_is_left_alone, random_state_is_left_alone, modes_are_left_alone,
)  # fmt: skip
