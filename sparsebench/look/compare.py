"""Where two strategies keep the same tokens: both act, one after the other, on one network that was trained without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sparsebench import seeds
from sparsebench.cells.fitting import fit_on, wants_images
from sparsebench.cells.prepare import Context, Prepared, strategy_of
from sparsebench.cells.run_cell import failure_of
from sparsebench.engine.worker import one_thread
from sparsebench.errors import StrategyError, UserError
from sparsebench.look.pictures import Scene, check_pictures, scene, spread
from sparsebench.look.training import Check, Trainer, nothing, trained_cell
from sparsebench.measure.agreement import expected_iou, iou, rank_correlation
from sparsebench.measure.selection import precision_recall
from sparsebench.models.actor import Actor
from sparsebench.planning import planner
from sparsebench.planning.job import Job
from sparsebench.planning.planner import Plan
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.cell import Cell, canonical
from sparsebench.strategy import Strategy
from sparsebench.tasks.base import relevant
from sparsebench.training.calibrate import calibrate
from sparsebench.training.evaluate import Choice, evaluate


@dataclass(frozen=True)
class Side:
    """One of the two: the strategy's label and its budget's."""

    label: str
    budget: str


@dataclass(frozen=True)
class Agreement:
    """How two strategies agree after one block, on n test samples of N patches.

    Attributes:
        block: which; at least one of them acted there.
        kept: two (n, N) booleans, after which patches a token is named.
        iou: (n,) of these, `expected` that of independent random choices; NaN where neither kept any.
        correlation: (n,) rank correlation of the scores that each gave last, over the patches that were there for both;
            NaN where there is none; None where a strategy that acted gave no scores.
        recall: the share of the relevant patches that each kept, mean over samples; None where nobody knows them.
    """

    block: int
    kept: tuple[np.ndarray, np.ndarray]
    iou: np.ndarray
    expected: np.ndarray
    correlation: np.ndarray | None
    recall: tuple[float, float] | None


@dataclass(frozen=True)
class Comparison:
    """Two strategies on one network.

    Attributes:
        cell: of the network.
        sides: A and B.
        stages: after each block in which one of them acted; the last is the end.
        scene: the test samples `rows` as pictures, or None where none were asked for.
    """

    cell: Cell
    sides: tuple[Side, Side]
    stages: list[Agreement]
    rows: np.ndarray
    scene: Scene | None


def compare(plugins: tuple[str, str], request: Request, trainer: Trainer, pictures: int) -> Comparison:
    """Return where two strategies keep the same patches of a task's test split.

    The network is that of the request's first repetition with the most training samples, trained without a strategy.
    Strategies that draw at random draw independently of each other.

    Args:
        plugins: A and B, each what names one strategy at one budget.
        request: of one task and one repetition; its plugins are files that bring the task or the model.
        trainer: trains the network if it is not there.
        pictures: how many test pictures go into the scene at most; 0 for none.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable; A and B are the same; or one of them, or the
            training, fails.
    """
    registry = _registry(request)
    jobs, strategies = _contenders(plugins, request, trainer, registry)
    plan, context = trainer.train(_of_network(request), registry, _check(pictures, registry))
    cell = _network(plan.jobs[-1], registry, context)
    with one_thread():
        choices = [_choices(job, strategy, cell, context.out) for job, strategy in zip(jobs, strategies, strict=True)]
    stages = list(_stages(choices, cell))
    if not stages:
        raise UserError(
            "neither strategy removes a token", got=f"budget {jobs[0].cell.budget.label}",
            next_step="give a smaller --keep or --macs",
        )  # fmt: skip
    a, b = (Side(job.label, job.cell.budget.label) for job in jobs)
    rows = spread(cell.data, pictures)
    return Comparison(cell.cell, (a, b), stages, rows, scene(cell, rows) if pictures else None)


def plan_of(plugins: tuple[str, str], request: Request, trainer: Trainer, pictures: int) -> Plan:
    """Return what `compare` would train; nothing is written."""
    registry = _registry(request)
    _contenders(plugins, request, trainer, registry)
    return trainer.plan(_of_network(request), registry, _check(pictures, registry))


def _registry(request: Request) -> Registry:
    """Return a registry that has loaded the request's plugin files."""
    registry = Registry()
    for text in request.plugins:
        if not text.endswith(".py"):
            raise UserError("--plugin", got=f"'{text}'", allowed="files that bring the task or the model")
        registry.load_file(Path(text))
    return registry


def _of_network(request: Request) -> Request:
    return replace(request, plugins=("dense",), alone=True)


def _check(pictures: int, registry: Registry) -> Check:
    return partial(check_pictures, registry=registry) if pictures else nothing


def _contenders(
    plugins: tuple[str, str], request: Request, trainer: Trainer, registry: Registry
) -> tuple[list[Job], list[Strategy]]:
    """Return the jobs of A and B, which must differ, and their strategies."""
    jobs = [_contender(text, request, trainer, registry) for text in plugins]
    if _key(jobs[0]) == _key(jobs[1]):
        raise UserError("A and B are the same strategy at the same budget", got=" and ".join(map(repr, plugins)))
    return jobs, [_acting(job, registry) for job in jobs]


def _contender(text: str, request: Request, trainer: Trainer, registry: Registry) -> Job:
    """Return a job of the one strategy, at one budget, that is named so."""
    jobs, _ = planner.jobs_of(replace(request, plugins=(text,), alone=True), trainer.files, registry)
    by_key = {_key(job): job for job in jobs if job.asked}
    job, *more = by_key.values()
    if more:
        listed = ", ".join(f"{job.label} at {job.cell.budget.label}" for job in by_key.values())
        raise UserError("two strategies are compared, each at one budget", got=f"'{text}', which is {listed}")
    return job


def _key(job: Job) -> str:
    return canonical([job.cell.strategy.model_dump(mode="json"), job.cell.budget.model_dump(mode="json")])


def _acting(job: Job, registry: Registry) -> Strategy:
    """Return the job's strategy, which must load and remove tokens in the test."""
    try:
        strategy = strategy_of(job, registry)
    except StrategyError as error:
        raise UserError(f"strategy '{job.label}': {error}") from error
    if not strategy.budgeted or strategy.trains_only:
        does = "removes tokens in training only" if strategy.trains_only else "chooses no tokens"
        raise UserError(f"strategy '{strategy.name}' {does}: there is nothing to compare")
    if strategy.trained:
        raise UserError(
            f"strategy '{strategy.name}' learns with the network it acts on, and what is compared are choices on a "
            "network that was trained without any", next_step="look at its choices with: sparsebench show-tokens",
        )  # fmt: skip
    return strategy


def _network(job: Job, registry: Registry, context: Context) -> Prepared:
    failure = store.read(context.out)[job.cell.id].failure
    if failure is not None:
        raise UserError(f"the network without a strategy has no result: {failure.reason}")
    with one_thread():
        return trained_cell(job, registry, context)


def _choices(job: Job, strategy: Strategy, cell: Prepared, out: Path) -> list[Choice]:
    """Return what a strategy chooses in the test."""
    network, of = cell.network, cell.cell
    stream = seeds.seed_of("compare", of.task.name, of.n_train, of.repetition, _key(job))
    try:
        actor = Actor(strategy, job.cell.budget, network.cost, network.grid, stream)
        if wants_images(actor):
            fit_on(cell, actor, job.origin.revision, out)
        if strategy.adaptive and len(cell.train.labels):
            calibrate(network, actor, cell.train)
        return evaluate(network, actor, cell.test, cell.recipe).choices
    except (Exception, SystemExit) as error:  # a strategy is a stranger's code and may raise anything
        raise UserError(f"strategy '{job.label}' has no result: {failure_of(error).reason}") from error


def _stages(choices: Sequence[list[Choice]], cell: Prepared) -> Iterator[Agreement]:
    """Yield the agreement after each block in which somebody acted, by what each chose last."""
    n, N = len(cell.test.labels), cell.network.cost.tokens
    shares = cell.test.relevance
    matter = None if shares is None else relevant(shares.cpu().numpy(), cell.data.test.mask)
    nothing = Choice(-1, np.ones((n, N), dtype=bool), np.full((n, N), np.nan), scored=True)
    last = [nothing, nothing]
    for block in sorted({choice.block for side in choices for choice in side}):
        for side, made in enumerate(choices):
            last[side] = next((choice for choice in made if choice.block == block), last[side])
        a, b = last
        yield Agreement(
            block, (a.kept, b.kept), iou(a.kept, b.kept), expected_iou(a.kept, b.kept),
            rank_correlation(a.scores, b.scores) if a.scored and b.scored else None,
            None if matter is None else (precision_recall(a.kept, matter)[1], precision_recall(b.kept, matter)[1]),
        )  # fmt: skip
