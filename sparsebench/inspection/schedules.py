"""The schedules that a strategy may have on a network at equal MACs, and which of them is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.deploy.apply import spec_of
from sparsebench.errors import UserError
from sparsebench.inspection.pictures import Trainer, has_head, load_cell
from sparsebench.measure.schedule import blocks_text, only_schedule
from sparsebench.models.actor import Actor
from sparsebench.plan.contenders import fit_budget, settings_of
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import ScheduleCandidate
from sparsebench.runner import devices
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context, Prepared, prepare
from sparsebench.runner.run_cell import deterministic
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import AUTO, Budget
from sparsebench.strategy.spec import parse
from sparsebench.training.evaluation import seconds_per_batch
from sparsebench.training.schedules import MANY, Chosen, choose
from sparsebench.training.steps import Samples

BATCH, REPEATS = 32, 5
"""Images of a timed batch, and timed batches of each schedule."""


@dataclass(frozen=True)
class Schedules:
    """The schedules of a strategy at one budget.

    Attributes:
        label: the strategy.
        macs: the budget.
        candidates: the schedules, in order, with their distances from the dense network.
        chosen: the number of the chosen one.
        speeds: images per second with each schedule.
        words: the strategy with the chosen counts, for --plugin and `apply`.
        reason: why there is only one schedule; "" if there are several.
        on_others: the name of the schedule that is chosen on other images; "" without other images.
        images: number of images of the choice.
        source: what the images are.
        distance: what the distances are.
    """

    label: str
    macs: float
    candidates: tuple[ScheduleCandidate, ...]
    chosen: int
    speeds: tuple[float, ...]
    words: str
    reason: str
    on_others: str
    images: int
    source: str
    distance: str


def compare_schedules(words: str, shares: tuple[float, ...], request: Request, trainer: Trainer) -> list[Schedules]:
    """Return the schedules of a strategy on a network at each of some shares of the dense MACs.

    Args:
        words: the strategy, as after --plugin, without a budget.
        shares: the shares.
        request: one task with one model.
        trainer: trains the network if it is missing.

    Raises:
        UserError: an argument is unknown or out of range, or the strategy does not fit the network.
    """
    registry = Registry()
    given = settings_of(words, registry)
    if len(given) != 1 or given[0][1] is not None:
        raise UserError(
            "schedules takes one strategy, without a budget", got=f"'{words}'", next_step="give the budgets with --macs"
        )
    strategy = given[0][0]
    if not strategy.budgeted:
        raise UserError(f"'{strategy.name}' has no budget, so it has no schedules")
    prepared, context, classifies = _network(request, trainer, registry)
    with deterministic():
        samples, rows, source = _images(prepared, context)
        return [_at_budget(words, strategy, share, prepared, samples, rows, source, classifies) for share in shares]


def _network(request: Request, trainer: Trainer, registry: Registry) -> tuple[Prepared, Context, bool]:
    """Return the cell of the network without a strategy, its context, and whether its outputs are logits.

    Its weights are trained or given.
    """
    request = replace(request, plugins=("dense",), alone=True, seeds=1)
    plan = trainer.plan(request, registry, pictures=True)
    job = plan.jobs[-1]
    head = has_head(plan, registry)
    if not job.cell.network:
        context = trainer.train(plan, registry)
        prepared = load_cell(job, registry, context, head=head)
    else:
        device = devices.first_of(devices.resolve_device(trainer.execution.device))
        context = Context(RunEnvironment(trainer.out, device, plan.locations))
        prepared = prepare(job, registry, context, head=head)
    return prepared, context, head and prepared.recipe.loss == "cross-entropy"


def _images(prepared: Prepared, context: Context) -> tuple[Samples, Tensor, str]:
    """Return images for two choices, the numbers of those to use, and what they are.

    Nothing is tested here, so test pictures may be used if there are no others.
    """
    task, locations = prepared.task, context.environment.locations
    try:
        separate = task.schedule_images(2 * MANY, 0, locations)
    except UserError:
        separate = task.model_copy(update={"choose_on": "test"}).schedule_images(2 * MANY, 0, locations)
    samples, source = prepared.train, "training images"
    if separate is not None:
        split, source = separate
        samples = context.samples(split, prepared.network.grid)
    if not len(samples.labels):
        raise UserError(f"task '{task.name}' has no images on which schedules could be compared")
    order = seeds.generator("schedule", task.name, "compared").permutation(len(samples.labels))[: 2 * MANY]
    return samples, torch.from_numpy(order).to(samples.labels.device), source


def _at_budget(
    words: str,
    strategy: Strategy,
    share: float,
    prepared: Prepared,
    samples: Samples,
    rows: Tensor,
    source: str,
    classifies: bool,
) -> Schedules:
    """Return the schedules of a strategy at a share of the MACs; see `compare_schedules`."""
    network = prepared.network
    budget = fit_budget(Budget(macs=share, schedule=AUTO), strategy, None, network.cost)
    if budget.schedule != AUTO:
        reason = only_schedule(strategy) or "no token is removed, or the network has one block"
        return Schedules(words, share, (), 0, (), spec_of(strategy, budget, parse(words).name), reason, "", 0, "", "")
    stream = seeds.seed_of("schedule", prepared.task.name, strategy.name)

    def choose_on(part: Tensor) -> Chosen:
        return choose(network, strategy, budget, samples, part, stream, classifies=classifies, source=source)

    first, others = rows[:MANY], rows[MANY:]
    chosen = choose_on(first)
    again = choose_on(others).choice.best.name if len(others) else ""
    speeds = [
        _speed(prepared, strategy, Budget(counts=candidate.counts, blocks=candidate.blocks), samples, stream)
        for candidate in chosen.choice.candidates
    ]
    return Schedules(
        label=words,
        macs=share,
        candidates=chosen.choice.candidates,
        chosen=chosen.choice.chosen,
        speeds=tuple(speeds),
        words=spec_of(strategy, chosen.counts, parse(words).name),
        reason="",
        on_others=again,
        images=len(first),
        source=source,
        distance=chosen.choice.distance,
    )


def _speed(prepared: Prepared, strategy: Strategy, budget: Budget, samples: Samples, stream: int) -> float:
    """Return the images per second of the network with a strategy at a budget."""
    actor = Actor(strategy, budget, prepared.network.cost, prepared.network.grid, stream)
    count, seconds = seconds_per_batch(prepared.network, actor, samples, BATCH, repeats=REPEATS)
    return count / float(np.median(seconds))


def as_rows(schedules: Schedules) -> list[dict[str, Any]]:
    """Return a row of a table for each schedule."""
    rows = []
    for number, candidate in enumerate(schedules.candidates):
        distance = "" if candidate.distance is None else f"{candidate.distance:.3f} ± {candidate.error:.3f}"
        rows.append(
            {
                "": "*" if number == schedules.chosen else "",
                "schedule": candidate.name,
                "tokens leave after": blocks_text(candidate.blocks),
                "tokens": " ".join(map(str, candidate.counts)),
                "MACs / dense": f"{candidate.macs_ratio:.3f}",
                schedules.distance: distance,
                "images": candidate.images or "",
                "images/s": f"{schedules.speeds[number]:.0f}",
            }
        )
    return rows
