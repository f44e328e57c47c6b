"""Measuring a trained cell: the metrics, samples, outcomes and notes of its record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.measure.metrics import Metric, decider_of, group_accuracies, scores, share
from sparsebench.measure.selection import quality, token_spuriosity
from sparsebench.models.actor import Actor, Fields, Pass, SplitPass
from sparsebench.models.base import Network
from sparsebench.records.record import Outcomes, bytes_of
from sparsebench.runner.prepare import Prepared
from sparsebench.strategy.base import Site
from sparsebench.strategy.plan_checks import only_removes
from sparsebench.strategy.plans import Keep, Plan
from sparsebench.strategy.tokens import Padded, sizes_after
from sparsebench.tasks.base import Data, Task, relevant
from sparsebench.tasks.images import PictureTask
from sparsebench.training.fit import calibrate
from sparsebench.training.loop import (
    BATCH,
    Evaluation,
    evaluate,
    first_batch,
    halving,
    patches_in,
    seconds_per_batch,
)
from sparsebench.training.steps import Samples, Steps

TOGETHER = 256
"""Most images with a discarded token in one forward pass. It is halved until the device has enough memory."""
FEWEST_TIMED = 4
"""Fewest batches of a test whose median time is used. If the test has fewer, one batch is timed repeatedly."""
ASKED_TWICE = 50
"""Test items in the check for leaks, which are tested twice."""
MISPLANNED = 0.02
"""A record notes a larger relative difference of actual and planned MACs if the token counts are as planned."""
SELECTION = ("selection_precision", "selection_recall", "selection_auroc")
Script = list[tuple[Site, int, Tensor]]
"""For each place where tokens are removed, in the network's order: site, block, (B, M) kept patches in rising order."""


class Watch:
    """Measures at intervals during a cell's training, first before the first step. It is called after each step.

    Attributes:
        looks: the number of finished steps at each measurement.
        seen: at each measurement the mean test loss, the test accuracy, and the values of the network's `observe`.

    Raises:
        UnsupportedError: the network has no `observe`.
    """

    def __init__(self, cell: Prepared, steps: Steps):
        if not hasattr(cell.network, "observe"):
            raise UnsupportedError(
                "watch=... is for networks that have `observe`, as vit:attention=positional has: others show nothing"
            )
        self.cell, self.steps, self.network = cell, cast(Any, steps), cast(Any, cell.network)
        self.first = {name: value.clone() for name, value in self.network.module.state_dict().items()}
        self.looks: list[int] = []
        self.seen: dict[str, list[float]] = {}

    def __call__(self, step: int) -> None:
        """Measure if it is due."""
        if step % self.cell.recipe.watch == 0:
            self.look(step)

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Measure after a number of steps, unless it was already done."""
        if self.looks and self.looks[-1] == step:
            return
        self.steps.store()
        self.looks.append(step)
        cell = self.cell
        if hasattr(self.steps, "test"):
            loss, accuracy = self.steps.test(cell.in_test, cell.test)
        else:
            evaluation = evaluate(self.network, cell.in_test, cell.test, cell.recipe)
            self.network.module.train()
            loss, accuracy = evaluation.loss, evaluation.accuracy
        train = _look(cell.train, cell.in_training, training=True)
        values = self.network.observe(train, _look(cell.test, cell.in_test))
        for name, value in {"test_loss": loss, "test_accuracy": accuracy, **values}.items():
            self.seen.setdefault(name, []).append(value)

    def iterations(self, success: Callable[[float, float], bool | None]) -> int | None:
        """Return the number of steps at the first successful measurement, or None."""
        looks = zip(self.looks, self.seen["test_loss"], self.seen["test_accuracy"], strict=True)
        return next((step for step, loss, accuracy in looks if success(loss, accuracy)), None)


def _look(samples: Samples, actor: Actor | None, training: bool = False) -> SplitPass:
    acting = None if actor is None else samples.begin(actor, samples.items, visit=0, training=training)
    relevance = samples.items.new_empty(len(samples.items), 0) if samples.relevance is None else samples.relevance
    return SplitPass(samples.inputs, samples.labels, relevance, acting)


Influences = tuple[np.ndarray, np.ndarray]
"""The (n, N) influences of tokens, and the (n,) predicted classes of the undisturbed network."""


def influences(network: Network, actor: Actor | None, samples: Samples, n: int) -> Influences | None:
    """Return z = |p - p^(-k)| for each token k of the first n samples, or None if it is not defined.

    p is the probability of the predicted class, with all tokens that the strategy keeps. p^(-k) is the probability of
    the same class if token k is discarded after the position embedding (arXiv 2509.04009; there only correctly
    classified images count). The strategy does not select again without the token: the same patches are removed in the
    same blocks. A token that is removed before the first block has z = 0. z is defined for strategies that only keep or
    remove tokens, the same number for each image, and do not fuse, merge or mix them.
    """
    return halving(TOGETHER, lambda together: _in_batches(network, actor, samples, n, together))


@torch.no_grad()
def _in_batches(network: Network, actor: Actor | None, samples: Samples, n: int, together: int) -> Influences | None:
    """Compute `influences` with at most `together` images in one forward pass."""
    network.module.eval()
    influences, predicted = [], []
    for rows in samples.items[:n].split(min(BATCH, together)):
        outputs, acting = samples.forward(network, actor, rows, visit=0, training=False)
        decisions = [] if acting is None else acting.decisions
        if not all(only_removes(decision.plan) and not isinstance(decision.plan, Padded) for decision in decisions):
            return None
        site = "input" if acting is None else acting.site
        script: Script = [(site, decision.block, decision.after.sort(dim=1).values) for decision in decisions]
        influences.append(_influences(network, samples, rows, outputs, script, together))
        predicted.append(outputs.argmax(dim=1))
    return torch.cat(influences).cpu().numpy(), torch.cat(predicted).cpu().numpy()


def _influences(
    network: Network, samples: Samples, rows: Tensor, outputs: Tensor, script: Script, together: int
) -> Tensor:
    """Return the (B, N) z of the samples `rows`, given the outputs and the script of the undisturbed network."""
    p, predicted = outputs.softmax(dim=1).max(dim=1)
    B, N = len(rows), network.cost.tokens
    z = p.new_zeros(B, N)
    tokens = torch.arange(N, device=rows.device).expand(B, N)
    if not script or script[0][0] != "input":
        script = [("input", 0, tokens), *script]
    # Images in which token k stays at equally many places have equal token counts, so they form a batch.
    counts = sum((patches_in(stay, N).long() for _, _, stay in script), start=torch.zeros_like(tokens))
    for count in range(1, len(script) + 1):
        for pairs in (counts == count).nonzero().split(together):
            image, token = pairs.unbind(dim=1)
            disturbed: Script = []
            for place, (site, block, stay) in enumerate(script):
                kept = stay[image]
                if place < count:  # (R, M - 1): without the one token of each row
                    kept = kept[kept != token[:, None]].reshape(len(kept), -1)
                disturbed.append((site, block, kept))
            probabilities = network(samples.take(rows[image]), Replay(N, disturbed)).softmax(dim=1)
            z[image, token] = (p[image] - probabilities.gather(1, predicted[image, None])[:, 0]).abs()
    return z


class Replay(Pass):
    """A pass that removes the patches of a script from N patches at the input."""

    requires = frozenset()
    weighs_sizes = ragged = masked = learns = reads_out = False
    whole = True
    own_macs, resting, previous = 0.0, 0, None

    def __init__(self, N: int, script: Script):
        self.script, self.requested = list(script), set()
        stay = self.script[0][2]
        self.index = torch.arange(N, device=stay.device).repeat(len(stay), 1)
        self.sizes, self.decisions, self.steps = torch.ones_like(self.index, dtype=torch.float32), [], []

    def acts_at(self, site: Site, block: int) -> bool:
        """See `Pass.acts_at`. A place where all tokens stay counts too."""
        return bool(self.script) and self.script[0][:2] == (site, block)

    def decide(self, block: int, fields: Fields) -> Plan:
        """Return the next plan of the script, see `Pass.decide`."""
        _, _, stay = self.script.pop(0)
        plan = Keep(torch.searchsorted(self.index, stay))
        self.index, self.sizes = stay, sizes_after(plan, self.sizes)
        return plan


def check_leaks(cell: Prepared, batch: int) -> None:
    """Test some samples twice, the second time with labels and masks of other samples, and compare the results.

    Labels and masks are exchanged in place, so code that finds them in any way gets the exchanged ones. The masks of an
    oracle, which may read them, are not exchanged. Random states are restored.

    Raises:
        StrategyError: kept tokens or predictions depend on labels or masks.
    """
    network, actor, samples, recipe = cell.network, cell.in_test, cell.test, cell.recipe
    if actor is None:
        return
    mask = None if actor.strategy.kind == "oracle" else samples.relevance
    few = copy.copy(samples)
    few.items, few.inputs = samples.items[:ASKED_TWICE], samples.inputs[:ASKED_TWICE]
    with seeds.global_states_kept():
        first = evaluate(network, actor, few, recipe, batch)
    with seeds.global_states_kept(), _exchange(samples.labels, mask):
        second = evaluate(network, actor, few, recipe, batch)
    n = len(few.items)
    if kept := (second.kept != first.kept).any(axis=1).sum():
        raise StrategyError(
            f"with labels and masks of other samples it kept other tokens of {kept} of {n}: it knows what only an "
            "oracle may, or does not choose the same twice"
        )
    if predicted := (second.predicted != first.predicted).sum():
        raise StrategyError(
            f"with labels and masks of other samples {predicted} of {n} had another prediction: what classes them "
            "knows the labels, or does not do the same twice"
        )


@contextmanager
def _exchange(labels: Tensor, mask: Tensor | None) -> Iterator[None]:
    """Give each sample the label (n,) and the mask (n, N) of another sample, of another class if possible.

    Masks also get their tokens in reverse order, as all samples may have equal masks. Everything is restored at the
    end.
    """
    order = labels.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = order.roll(max(1, len(order) // 2))
    changed = [(labels, labels.clone(), labels[rows])]
    if mask is not None:
        changed.append((mask, mask.clone(), mask[rows].flip(1)))
    for tensor, _, others in changed:
        tensor.copy_(others)
    try:
        yield
    finally:
        for tensor, before, _ in changed:
            tensor.copy_(before)


class Result:
    """The results of a cell, filled while it runs. The attributes are fields of its record."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.trajectory: tuple[Step, ...] = ()
        self.samples: dict[str, tuple[float | None, ...]] = {}
        self.outcomes: Outcomes | None = None
        self.notes: dict[str, str] = {}

    def add(self, name: str, value: float | None, n: int, unit: str = "") -> None:
        """Add one metric, see `Metric.of`."""
        self.metrics[name] = Metric.of(name, value, n, unit)


def measure(
    result: Result, cell: Prepared, trained: dict[str, float], batch: int | None = None,
    *, leaks: bool = True, on_done: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Test the trained network of a cell and add all measurements to the result.

    Args:
        result: the result to fill.
        cell: the cell.
        trained: the outcome of the training.
        batch: the test batch size to try first; None for `first_batch`.
        leaks: whether to check that results do not depend on labels or masks.
        on_done: called during the test with the number of finished items.

    Raises:
        DivergedError: the weights or the test loss are not finite.
        StrategyError: kept tokens or predictions depend on labels or masks.
    """
    network, recipe = cell.network, cell.recipe
    if not bool(torch.stack([p.isfinite().all() for p in network.module.parameters()]).all()):
        raise DivergedError("training diverged: the weights after the last step are not finite")
    _calibrate(result, cell)
    first = batch or first_batch(network, cell.test)
    if leaks:
        check_leaks(cell, first)
    has_mask = cell.test.relevance is not None
    evaluation = evaluate(network, cell.in_test, cell.test, recipe, first, choices=has_mask, on_done=on_done)
    if not np.isfinite(evaluation.loss):
        raise DivergedError(f"training diverged: the test loss is {evaluation.loss}")
    for name, value in trained.items():
        result.add(name, value, len(cell.train.labels))
    _add_validation(result, cell)
    _add_outcomes(result, cell.task, cell.data, evaluation)
    _add_selection(result, cell, evaluation)
    _add_spuriosity(result, cell)
    _add_cost(result, network, cell.in_test, evaluation)
    result.add("parameters", sum(weight.numel() for weight in network.module.parameters()), 1)
    if cell.task.inputs == "images":
        _add_timing(result, network, cell.in_test, cell.test, evaluation)
    if batch or first > evaluation.batch:
        halved = f"; the device had no memory for {first}" if first > evaluation.batch else ""
        result.notes["test_batch"] = f"{evaluation.batch}{halved}"
    if cell.start.name:
        result.notes["initial_weights"] = cell.start.name
    if cell.actor is not None and (scoring := network.cost.scoring(cell.actor.requires)):
        result.notes["attention"] = "received" if scoring == "received" else network.attention_source


def _calibrate(result: Result, cell: Prepared) -> None:
    """Calibrate an adaptive strategy on training images, if any, so that it spends the budget."""
    actor = cell.in_test
    if actor is None or not actor.strategy.adaptive:
        return
    if len(cell.train.labels) and (outcome := calibrate(cell.network, actor, cell.train)) is not None:
        budget, ratio, images = outcome
        spent = f"{ratio:.4f} of the dense MACs on {images} training images"
        result.notes["calibration"] = f"counts of {budget.label}: {spent}"


@torch.no_grad()
def add_watch(result: Result, watch: Watch, steps: int) -> None:
    """Measure after the last step; add the measurements made during training, and the network's `trained_values`."""
    watch.look(steps)
    n = len(watch.cell.test.labels)
    result.samples["watched_steps"] = tuple(map(float, watch.looks))
    result.samples |= {f"watched_{name}": tuple(values) for name, values in watch.seen.items()}
    trained = watch.network.trained_values(watch.first, _look(watch.cell.test, None))
    result.samples |= {f"trained_{name}": values for name, values in trained.items()}
    for name, unit in watch.network.shows.items():
        result.add(name, watch.seen[name][-1], n, unit)
    result.add("iterations", watch.iterations(watch.cell.task.success), n)


def _add_validation(result: Result, cell: Prepared) -> None:
    """Add the validation accuracy of the tested weights, and that of the worst group."""
    split = cell.data.validation
    if split is None or cell.validation is None:
        return
    correct = evaluate(cell.network, cell.in_test, cell.validation, cell.recipe).predicted == split.labels
    result.metrics["validation_accuracy"] = share(correct)
    if len(cell.data.group_names) > 1:
        worst = np.nanmin(group_accuracies(correct, split.groups, len(cell.data.group_names)))
        result.add("validation_worst_group_accuracy", float(worst), len(correct))


def _add_outcomes(result: Result, task: Task, data: Data, evaluation: Evaluation) -> None:
    """Add accuracy, loss, success, group metrics, the task's own metrics, and the outcome of each item.

    Raises:
        UserError: the task returns a metric that is not declared, that exists already, or that is infinite or not a
            number.
    """
    test, group_names = data.test, data.group_names
    items = replace(evaluation, labels=test.labels, groups=test.groups, foregrounds=test.foregrounds)
    sizes = np.bincount(data.train.groups, minlength=len(group_names))
    result.metrics |= scores(items, len(data.classes), group_names, sizes.tolist())
    if task.recipe().loss == "cross-entropy":
        result.add("p_label", items.p_label, len(items.labels))
    for name, success in task.successes(items.loss, items.accuracy).items():
        result.add(name, float(success), 1, "" if decider_of(name) else _unit_of(task, name))
    for name, value in task.measure(items, test).items():
        if name in result.metrics:
            raise UserError(f"metric '{name}' of task '{task.name}' is measured already", next_step="rename it")
        if not isinstance(value, int | float | np.number) or np.isinf(value):
            got, allowed = repr(value)[:60], "a finite number, or NaN"
            raise UserError(f"metric '{name}' of task '{task.name}'", got=got, allowed=allowed)
        result.add(name, value, len(items.labels), _unit_of(task, name))
    result.outcomes = Outcomes(
        n=len(test.labels), predicted=bytes_of(items.predicted), label=bytes_of(items.labels),
        group=bytes_of(items.groups), rank=bytes_of(items.ranks), foreground=bytes_of(items.foregrounds),
    )  # fmt: skip


def _unit_of(task: Task, name: str) -> str:
    """Return the unit that a task declares for a metric."""
    units = {kind.name: kind.unit for kind in task.metrics}
    if name not in units:
        raise UserError(
            f"task '{task.name}' returns a metric that it does not declare", got=f"'{name}'",
            allowed=sorted(units) or "none", next_step="add it to the task's `metrics`",
        )  # fmt: skip
    return units[name]


def _add_selection(result: Result, cell: Prepared, evaluation: Evaluation) -> None:
    """Add precision, recall and AUROC of the selection of relevant tokens: at the end, and by block if several.

    They are None if the relevant tokens are unknown.
    """
    if cell.test.relevance is None:
        for name in SELECTION:
            result.add(name, None, 0)
        return
    matter = relevant(cell.test.relevance.cpu().numpy(), cell.data.test.mask)
    end, *blocks = ((choice.block, *quality(choice.kept, choice.scores, matter)) for choice in evaluation.choices)
    for name, value in zip(SELECTION, end[1:], strict=True):
        result.add(name, value, len(evaluation.predicted))
    if cell.network.cost.depth == 1 or not blocks:
        return
    names = ("blocks", "precision_by_block", "recall_by_block", "auroc_by_block")
    for name, values in zip(names, zip(*blocks, strict=True), strict=True):
        result.samples[f"selection_{name}"] = tuple(None if np.isnan(value) else float(value) for value in values)


def _add_spuriosity(result: Result, cell: Prepared) -> None:
    """Add the token spuriosity indices, if the task measures them: with the strategy, and without it (`_dense`).

    Each is computed over those of the first images that the network then classifies correctly, so the two may be of
    different images. The value is None if there is no such image.
    """
    network, actor, samples = cell.network, cell.in_test, cell.test
    if not isinstance(cell.task, PictureTask) or not cell.task.spuriosity or samples.relevance is None:
        return
    relevance = samples.relevance[: cell.task.spuriosity]
    n, inside, labels = len(relevance), relevance.cpu().numpy() > 0, samples.labels[: len(relevance)].cpu().numpy()
    dense = influences(network, None, samples, n)
    acted = dense if actor is None else influences(network, actor, samples, n)
    if acted is None:
        result.notes["spuriosity"] = "not measured: tokens are fused, merged, mixed or of a number of each image's own"
    for end, outcome in (("", acted), ("_dense", dense)):
        right = np.zeros(n, dtype=bool) if outcome is None else outcome[1] == labels
        indices = (None, None) if outcome is None else token_spuriosity(outcome[0][right], inside[right])
        for name, value in zip(("a_tsi", "m_tsi"), indices, strict=True):
            result.add(name + end, value, int(right.sum()))


def _add_cost(result: Result, network: Network, actor: Actor | None, evaluation: Evaluation) -> None:
    """Add the realised MACs, the dense MACs and the planned share of the dense MACs."""
    cost, n = network.cost, len(evaluation.predicted)
    full = cost.dense()
    steps = evaluation.steps or full
    result.trajectory = tuple(steps)
    dense, macs = cost.macs(full), cost.macs(steps)
    planned = dense if actor is None else cost.macs(actor.planned)
    bounds = actor is not None and actor.strategy.adaptive and actor.budget.counts is not None
    result.add("macs", macs, n)
    result.add("macs_dense", dense, n)
    result.add("macs_ratio", macs / dense, n)
    if len(evaluation.macs) and np.ptp(evaluation.macs):
        result.add("macs_p95", float(np.quantile(evaluation.macs, 0.95)), n)
    result.add("macs_ratio_planned", None if bounds else planned / dense, n)
    counts = [[(step.tokens_in, step.tokens_out) for step in row] for row in (steps, actor.planned if actor else full)]
    if counts[0] == counts[1] and abs(macs / planned - 1) > MISPLANNED:
        result.notes["cost_model"] = f"{macs / dense:.3f} of the dense MACs, planned as {planned / dense:.3f}"


def _add_timing(
    result: Result, network: Network, actor: Actor | None, samples: Samples, evaluation: Evaluation
) -> None:
    """Add the speed of the test. If it had too few batches, one batch is timed repeatedly."""
    batch, seconds = evaluation.batch, evaluation.seconds
    if len(seconds) < FEWEST_TIMED:
        batch, seconds = seconds_per_batch(network, actor, samples, batch)
    result.samples["seconds_per_batch"] = tuple(round(s, 6) for s in seconds)
    result.add("images_per_s", batch / float(np.median(seconds)), len(seconds))
    result.add("timed_batch", batch, len(seconds))
