"""Evaluating a trained network: its outcomes and times, the check for leaks, and the influence of single tokens."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import StrategyError
from sparsebench.measure.cost import Step, mean_step
from sparsebench.measure.metrics import Items
from sparsebench.models.actor import Actor, Fields, Pass, TokenState
from sparsebench.models.base import Network
from sparsebench.strategy.base import Site, Strategy
from sparsebench.strategy.plan_checks import only_removes
from sparsebench.strategy.plans import Keep, Plan, Rest
from sparsebench.strategy.tokens import Padded, sizes_after
from sparsebench.strategy.view import TokenView
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Samples, losses, outputs_of, predictions

T = TypeVar("T")

BATCH = 200
"""Samples per batch. Strategies cost small networks a fixed 4 to 10 ms per batch, so that larger batches are faster.
Beyond a few hundred images the activations no longer fit a CPU's cache."""
TIMED_BATCH = 100
"""Largest number of samples per batch for measuring speed."""
CPU_MACS = 2e11
"""Largest MACs of a batch on a CPU: a few seconds of one core, tens of megabytes of activations."""
CHECKED = 50
"""Test items in the check for leaks, which are tested twice."""
TOGETHER = 256
"""Most images with a discarded token in one forward pass. It is halved until the device has enough memory."""
Script = list[tuple[Site, int, Tensor]]
"""For each place where tokens are removed, in the network's order: site, block, (B, M) kept patches in rising order."""


@dataclass(frozen=True)
class Choice:
    """The selection of a strategy in one block, for n samples of N patches.

    Attributes:
        block: the block; -1 for the patches that are kept at the end, with the scores of the first decision.
        kept: (n, N) booleans, the patches that are present after the block.
        scores: (n, N), NaN for patches that were absent before the block; equal to `kept` without scores.
        scored: whether the strategy gave scores.
        has_choice: whether the strategy made a selection, in at least one batch.
    """

    block: int
    kept: np.ndarray
    scores: np.ndarray
    scored: bool
    has_choice: bool = True


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What strategy and network did with n samples of N tokens.

    Attributes:
        kept: (n, N) booleans, the patches that are present at the end.
        choices: the selection at the end, and in each block with a site of the strategy; empty unless requested.
        steps: realised token counts of each block, mean over samples; empty without a strategy.
        macs: (n,) MACs of each sample, or empty.
        batch: number of samples per batch.
        seconds: wall seconds of network and strategy for each full batch except the first, which includes the
            initialisation of the process.
    """

    kept: np.ndarray
    choices: list[Choice]
    steps: list[Step]
    macs: np.ndarray
    batch: int
    seconds: list[float]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Items, Passes):
    """The outcomes of the test items, with their passes. All groups are 0, since they are not known here."""

    kept: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Features(Passes):
    """The (n, C) float32 outputs of a network without a head for n samples, with their passes."""

    outputs: np.ndarray


def first_batch(network: Network, samples: Samples) -> int:
    """Return the batch size to try first: `BATCH`, or on a CPU fewer samples, see CPU_MACS."""
    if samples.labels.device.type != "cpu":
        return BATCH
    cost = network.cost
    return max(1, min(BATCH, int(CPU_MACS / cost.macs(cost.dense()))))


def evaluate(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    recipe: Recipe,
    batch: int | None = None,
    *,
    choices: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Return the evaluation of all samples. A sample's result does not depend on its batch.

    The host waits for the device once, at the end; with `choices` once per batch.

    Args:
        network: the network.
        actor: the strategy on the network, or None.
        samples: n samples of N tokens.
        recipe: the task's recipe.
        batch: samples per batch; `first_batch` by default. It is halved while the device is out of memory.
        choices: whether to return the selection of each block.
        on_done: called after each batch with the number of samples done.
    """

    def work(size: int) -> Evaluation:
        outcomes = _Outcomes(network, samples, choices, recipe)
        seconds = pass_all(network, actor, samples, size, outcomes, on_done)
        return outcomes.evaluation(size, seconds)

    return halving(batch or first_batch(network, samples), work)


def features(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    batch: int | None = None,
    *,
    visit: int = 0,
    choices: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Features:
    """Return the outputs of a network without a head for all samples; see `evaluate`.

    Args:
        network, actor, samples, batch, choices, on_done: see `evaluate`.
        visit: number of the pass, which seeds the strategy's random numbers. Splits whose samples have equal numbers
            need different passes.
    """

    def work(size: int) -> Features:
        outcomes = Outputs(network, samples, choices)
        seconds = pass_all(network, actor, samples, size, outcomes, on_done, visit)
        return outcomes.features(size, seconds)

    return halving(batch or first_batch(network, samples), work)


def halving(batch: int, work: Callable[[int], T]) -> T:
    """Return `work(batch)`. Halve the batch size while the device is out of memory.

    Raises:
        torch.OutOfMemoryError: even a batch of one sample does not fit.
    """
    while True:
        try:
            return work(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2
        torch.cuda.empty_cache()


@torch.no_grad()
def pass_all(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    batch: int,
    outcomes: Outputs,
    on_done: Callable[[int], None] | None,
    visit: int = 0,
) -> list[float]:
    """Add the outputs of all samples to `outcomes`, and return `Passes.seconds`."""
    network.module.eval()
    marks: list[tuple[Any, Any]] = []
    done = 0
    for rows, inputs in samples.batches(batch):
        start = _mark(samples.labels.device)
        acting = None if actor is None else samples.begin(actor, rows, visit=visit, training=False)
        outputs = outcomes.outputs(inputs, acting)
        marks.append((start, _mark(samples.labels.device)))
        outcomes.add(rows, outputs, acting)
        done += len(rows)
        if on_done is not None:
            on_done(done)
    full_batches = done // batch
    return [_seconds(*pair) for pair in marks[1:full_batches]]


class Outputs:
    """The outputs of batches. They stay on the device until the end, unless choices are wanted."""

    def __init__(self, network: Network, samples: Samples, choices: bool):
        self.network, self.samples, self.wants_choices = network, samples, choices
        self.tensors = defaultdict[str, list[Tensor]](list)
        self.choices: list[list[Choice]] = []
        self.steps: list[list[tuple[int, Step]]] = []
        self.macs: list[np.ndarray] = []

    def outputs(self, inputs: Tensor, acting: Pass | None) -> Tensor:
        """Return the outputs of a batch."""
        return outputs_of(self.network, inputs, acting)

    def add(self, rows: Tensor, outputs: Tensor, acting: Pass | None) -> None:
        """Add the outputs of a batch, and the selection of the strategy in its pass, if any."""
        self.keep(rows, outputs, acting)
        N = self.network.cost.tokens
        if acting is None:
            kept = torch.ones(len(rows), N, dtype=torch.bool, device=rows.device)
        else:
            kept = patches_in(acting.index, N)
            self.steps.append([(len(rows), step) for step in acting.steps])
            self.macs.append(np.broadcast_to(self.network.cost.macs(acting.steps), len(rows)))
        self.tensors["kept"].append(kept)
        if self.wants_choices:
            self.choices.append(_choices_of_batch(kept, acting, N))

    def keep(self, rows: Tensor, outputs: Tensor, acting: Pass | None) -> None:
        """Keep what is needed of the outputs of a batch."""
        self.tensors["outputs"].append(outputs.float())

    def features(self, batch: int, seconds: list[float]) -> Features:
        """Return the outputs of all batches, with the batch size and the seconds of its full batches."""
        return Features(**self._passes(batch, seconds))

    def _passes(self, batch: int, seconds: list[float]) -> dict[str, Any]:
        """Return the tensors of all batches as arrays, and the other fields of `Passes`."""
        choices = []
        for parts in zip(*self.choices, strict=True):
            if any(part.has_choice for part in parts):
                choices.append(_join(parts))
        arrays = {name: torch.cat(parts).cpu().numpy() for name, parts in self.tensors.items()}
        return arrays | {
            "choices": choices,
            "steps": [mean_step(block) for block in zip(*self.steps, strict=True)],
            "macs": np.concatenate(self.macs) if self.macs else np.empty(0),
            "batch": batch,
            "seconds": seconds,
        }


class _Outcomes(Outputs):
    """The outcomes of the batches of a test."""

    def __init__(self, network: Network, samples: Samples, choices: bool, recipe: Recipe):
        super().__init__(network, samples, choices)
        self.recipe = recipe

    def keep(self, rows: Tensor, outputs: Tensor, acting: Pass | None) -> None:
        """See `Outputs.keep`: predictions, losses, ranks, and with a cross-entropy the confidence."""
        if self.samples.absent is not None:
            outputs = outputs.masked_fill(self.samples.absent, -torch.inf)
        labels = self.samples.labels[rows]
        self.tensors["predicted"].append(predictions(self.recipe, outputs))
        self.tensors["losses"].append(losses(self.recipe, outputs, labels).float())
        self.tensors["ranks"].append(ranks(self.recipe, outputs, labels))
        if self.recipe.loss == "cross-entropy":
            self.tensors["confidence"].append(outputs.float().softmax(dim=1).amax(dim=1))

    def evaluation(self, batch: int, seconds: list[float]) -> Evaluation:
        """Return the evaluation of all batches, with the batch size and the seconds of its full batches."""
        labels = self.samples.labels[self.samples.items].cpu().numpy()
        return Evaluation(**self._passes(batch, seconds), labels=labels, groups=np.zeros_like(labels))


def _choices_of_batch(kept: Tensor, acting: Pass | None, N: int) -> list[Choice]:
    """Return the selection of a batch at the end, from (B, N) `kept`, and then in each block of the strategy."""
    if acting is None:
        return [_choice(-1, kept, kept, scored=False)]
    scored = acting.scores is not None
    end = _choice(-1, kept, acting.scores if acting.scores is not None else kept, scored)
    return [end, *_choices(acting, N)]


def _mark(device: torch.device) -> Any:
    """Return a time mark after the work queued on the device so far, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two marks, after the device has finished."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def clock(device: torch.device) -> float:
    """Wait until the device has finished, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ranks(recipe: Recipe, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return (B,), the number of classes that the logits (B, classes) rank before the label; ties by class number.

    Networks that predict by signs do not rank classes. For them it is 0 if the prediction is right, otherwise 1.
    """
    if recipe.loss != "cross-entropy":
        return (predictions(recipe, outputs) != labels).long()
    correct = outputs.gather(1, labels[:, None])
    before = torch.arange(outputs.shape[1], device=labels.device) < labels[:, None]
    return ((outputs > correct) | ((outputs == correct) & before)).sum(dim=1, dtype=torch.int32)


def patches_in(index: Tensor, N: int) -> Tensor:
    """Return (B, N) booleans, which patches are among the (B, M) tokens `index`; -1 is a token without a patch."""
    return _spread(index, torch.ones_like(index, dtype=torch.bool), N)


def _spread(index: Tensor, values: Tensor, N: int) -> Tensor:
    """Return (B, N), the value of each patch's token among the (B, M) tokens, or 0.

    A token without a patch (-1) is written into an additional column, which is removed.
    """
    return values.new_zeros(len(index), N + 1).scatter(1, index % (N + 1), values)[:, :-1]


def _choice(block: int, kept: Tensor, scores: Tensor, scored: bool, has_choice: bool = True) -> Choice:
    """Return the Choice of one batch from (B, N) tensors."""
    return Choice(block, kept.cpu().numpy(), scores.float().cpu().numpy(), scored, has_choice)


def _choices(acting: Pass, N: int) -> Iterator[Choice]:
    """Yield the selection in each block with a site of the strategy."""
    decisions = {decision.block: decision for decision in acting.decisions}
    kept = torch.ones(len(acting.index), N, dtype=torch.bool, device=acting.index.device)
    for block in sorted(acting.actor.keep):
        if (decision := decisions.get(block)) is None:
            yield _choice(block, kept, kept.float().masked_fill(~kept, torch.nan), scored=False, has_choice=False)
            continue
        # Tokens that rested in earlier blocks are present again.
        present = patches_in(decision.before, N) if isinstance(decision.plan, Rest) else kept
        kept = patches_in(decision.after, N)
        values = decision.plan.scores
        scores = kept.float() if values is None else _spread(decision.before, values.float(), N)
        yield _choice(block, kept, scores.masked_fill(~present, torch.nan), values is not None)


def _join(parts: Sequence[Choice]) -> Choice:
    kept = np.concatenate([part.kept for part in parts])
    scores = np.concatenate([part.scores for part in parts])
    return Choice(parts[0].block, kept, scores, all(part.scored for part in parts))


@torch.no_grad()
def seconds_per_batch(
    network: Network, actor: Actor | None, samples: Samples, batch: int, repeats: int = 7
) -> tuple[int, list[float]]:
    """Return the batch size and the wall seconds of `repeats` forward passes, after one that is not counted.

    The batch has at most `batch` and at most `TIMED_BATCH` samples. It is already on the device, so that only network
    and strategy are timed.
    """
    network.module.eval()
    rows = samples.items[: min(batch, TIMED_BATCH)]
    moved = Samples(
        samples.take(rows), samples.labels[rows], None if samples.relevance is None else samples.relevance[rows]
    )
    seconds = []
    for repeat in range(repeats + 1):
        start = clock(rows.device)
        moved.forward(network, actor, moved.items, visit=0, training=False)
        if repeat:
            seconds.append(clock(rows.device) - start)
    return len(rows), seconds


class StandIn:
    """Replaces a strategy in the harness: has its attributes, but other plans."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)


class _Spy(TokenView):
    """A view that records which fields are read, and their values at that time.

    A strategy that calls `rows` or `pairs` has not read `index`, which these methods read.
    """

    def __init__(self, view: TokenView, read: set[str]):
        shown = {"index": view.index.clone(), "sizes": view.sizes.clone()}
        self.__dict__.update(view.__dict__, _view=view, _read=read, _shown=shown)

    def rows(self, values: Tensor) -> Tensor:
        return self._view.rows(values)

    def pairs(self, graph: Tensor) -> Tensor:
        return self._view.pairs(graph)

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
        """Return the names of the fields that have changed since they were read."""
        return {name for name, was in self._shown.items() if not same(vars(self)[name], was)}


class Watched(StandIn):
    """A strategy whose use of its views is recorded.

    Attributes:
        read: the attributes of views that it has read.
        changed: the attributes of views that it has changed in place.
    """

    def __init__(self, strategy: Strategy):
        super().__init__(strategy)
        self.read: set[str] = set()
        self.changed: set[str] = set()

    def start(self, view: TokenView) -> None:
        """Let the strategy build what it reads later."""
        spy = _Spy(view, self.read)
        self.strategy.start(spy)
        self.changed |= spy._changed()

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Return the plan of the strategy."""
        spy = _Spy(view, self.read)
        plan = self.strategy.plan(spy, keep)
        self.changed |= spy._changed()
        return plan


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)))


def check_leaks(network: Network, actor: Actor, samples: Samples, recipe: Recipe | None, batch: int) -> None:
    """Test some samples twice, the second time with labels and masks of other samples, and compare the results.

    Labels and masks are exchanged in place, so code that finds them in any way gets the exchanged ones. The masks of an
    oracle, which may read them, are not exchanged. Random states are restored.

    Args:
        network, actor, samples, batch: see `evaluate`.
        recipe: the task's recipe; None for a network without a head, whose outputs are compared.

    Raises:
        StrategyError: kept tokens or predictions depend on labels or masks, or the strategy changes its view in place.
    """
    mask = None if actor.strategy.kind == "oracle" else samples.relevance
    few = copy.copy(samples)
    few.items = samples.items[:CHECKED]
    few.inputs = samples.inputs[:CHECKED]
    watched = copy.copy(actor)
    strategy = Watched(actor.strategy)
    watched.strategy = cast(Any, strategy)
    with seeds.global_states_kept():
        first_kept, first_answers = _answers(network, watched, few, recipe, batch)
    if strategy.changed:
        raise StrategyError(f"changed in place: {', '.join(f'view.{name}' for name in sorted(strategy.changed))}")
    with seeds.global_states_kept(), _exchange(samples.labels, mask):
        second_kept, second_answers = _answers(network, actor, few, recipe, batch)
    n = len(few.items)
    if kept := (second_kept != first_kept).any(axis=1).sum():
        raise StrategyError(
            f"with labels and masks of other samples it kept other tokens of {kept} of {n}: it knows what only an "
            "oracle may, or does not choose the same twice"
        )
    if differ := _differ(first_answers, second_answers).any(axis=1).sum():
        answer = "other features" if recipe is None else "another prediction"
        raise StrategyError(
            f"with labels and masks of other samples {differ} of {n} had {answer}: what classes them "
            "knows the labels, or does not do the same twice"
        )


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which numbers of two arrays differ; NaN equals NaN."""
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


def _answers(
    network: Network, actor: Actor, samples: Samples, recipe: Recipe | None, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (n, N) kept patches, and the (n, 1) predictions, or without a recipe the (n, C) outputs."""
    if recipe is None:
        passes = features(network, actor, samples, batch)
        return passes.kept, passes.outputs
    evaluation = evaluate(network, actor, samples, recipe, batch)
    return evaluation.kept, evaluation.predicted[:, None]


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
        if acting is not None and (acting.keeps_left or acting.changes_maps):
            return None  # a replay only removes tokens
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
            # A network needs only the state of the tokens, and to know when and how they change.
            replay = cast(Pass, Replay(N, disturbed))
            probabilities = network(samples.take(rows[image]), replay).softmax(dim=1)
            z[image, token] = (p[image] - probabilities.gather(1, predicted[image, None])[:, 0]).abs()
    return z


class Replay(TokenState):
    """The tokens in a forward pass without a strategy, in which patches are removed as a script says.

    Args:
        N: number of patches at the input.
        script: where patches are removed, and which stay; each image has its own.
    """

    def __init__(self, N: int, script: Script):
        stay = script[0][2]
        super().__init__(torch.arange(N, device=stay.device).repeat(len(stay), 1))
        self.script = list(script)

    def acts_at(self, site: Site, block: int) -> bool:
        """See `Pass.acts_at`. A place where all tokens stay counts too."""
        return bool(self.script) and self.script[0][:2] == (site, block)

    def decide(self, block: int, fields: Fields) -> Plan:
        """Return the next plan of the script, see `Pass.decide`."""
        _, _, stay = self.script.pop(0)
        plan = Keep(torch.searchsorted(self.index, stay))
        self.index, self.sizes = stay, sizes_after(plan, self.sizes)
        return plan
