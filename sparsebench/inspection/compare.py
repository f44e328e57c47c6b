"""Compare which patches two strategies keep on a network trained without a strategy: data, table and picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tabulate import tabulate

from sparsebench import seeds
from sparsebench.errors import StrategyError, UserError
from sparsebench.inspection.pictures import (
    Block,
    Ink,
    Scene,
    Trainer,
    check_labels,
    has_head,
    load_cell,
    scene,
    sheet,
    spread,
    tint,
)
from sparsebench.measure.selection import expected_iou, iou, quality, rank_correlation
from sparsebench.models.actor import Actor
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import locate_model
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Cell, canonical
from sparsebench.runner.prepare import Context, Prepared, choose_schedule, fit_on, strategy_of, wants_images
from sparsebench.runner.run_cell import deterministic, failure_of
from sparsebench.stats import style
from sparsebench.stats.intervals import mean_interval
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import AUTO
from sparsebench.tasks.base import relevant
from sparsebench.training.evaluation import Choice, evaluate, features
from sparsebench.training.fit import calibrate
from sparsebench.training.schedules import outputs_in_test

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND = (
    "IoU: patches kept by both over patches kept by A or B, mean over test samples. Chance: expected IoU of "
    "independent random choices of the same numbers of patches. Rank correlation: Spearman's, of the latest scores of "
    "A and B, over the patches present in both; - if there is none. [ ]: 95 % intervals over test samples. Of merged "
    "patches the first counts as kept; fused and mixed tokens keep no patch."
)
ABOUT_FEATURES = (
    "Cosine: of the pooled features, mean over test samples; dense is the network without a strategy. The network has "
    "no head, so no classes are compared."
)
Row = dict[str, Any]
NETWORK: dict[str, Any] = {"plugins": ("dense",), "alone": True}
"""Fields of a request for only the dense network."""
BOTH = 2
INKS = {0: Ink(style.COLOURS[0], 0.4), 1: Ink(style.COLOURS[3], 0.4), BOTH: Ink(style.BLACK, 0)}
"""Marks of patches that only A, only B, or both keep: blue, vermilion and black. Colour-blind people can distinguish
these from each other, from grey and from yellow."""


@dataclass(frozen=True)
class Comparison:
    """Two strategies on one network, on n test samples of N patches.

    Attributes:
        cell: the cell of the network.
        sides: for A and B, the labels of strategy and budget.
        stages: for each block in which A or B acted, the latest choices of A and B; the last block is the end.
        relevant: (n, N) which patches are relevant, or None if unknown.
        rows: (k,) numbers of the test samples in `scene`.
        scene: the pictures, or None if none were requested.
        cosines: for a network without a head, by pair the (n,) cosines of its pooled features: of A and of B with those
            without a strategy, and of both; empty for a network with a head.
    """

    cell: Cell
    sides: tuple[tuple[str, str], tuple[str, str]]
    stages: dict[int, tuple[Choice, Choice]]
    relevant: np.ndarray | None
    rows: np.ndarray
    scene: Scene | None
    cosines: dict[str, np.ndarray] = field(default_factory=dict)


def compare(plugins: tuple[str, str], request: Request, trainer: Trainer, pictures: int) -> Comparison:
    """Compare the patches that two strategies keep in a task's test split.

    The network is trained without a strategy, for the request's first repetition with the most training samples. Random
    numbers of the two strategies are independent.

    Args:
        plugins: A and B: two values of `--plugin`, each with one strategy at one budget.
        request: one task and one repetition; its plugins are files with the task or the model.
        trainer: trains the network if it is missing.
        pictures: maximal number of test pictures in the scene; 0 for no scene.

    Raises:
        UserError: an argument is unknown, out of range, missing or unwritable; A and B are the same; or a strategy or
            the training fails.
    """
    registry = Registry()
    plan, sides = _planned(plugins, request, trainer, pictures, registry)
    context = trainer.train(plan, registry)
    job = plan.jobs[-1]
    head = has_head(plan, registry)
    failure = store.read(trainer.out)[job.cell.id].failure if head else None
    if failure is not None:
        raise UserError(f"the network without a strategy has no result: {failure.reason}")
    with deterministic():
        prepared = load_cell(job, registry, context, head=head)
        shape = len(prepared.test.labels), prepared.network.cost.tokens
        if not head:  # the outputs are features, which have no right class
            prepared.test.labels = torch.zeros_like(prepared.test.labels)
        a_outcome, b_outcome = (_outcome(*side, prepared, context, head=head) for side in sides)
        stages = _stages([a_outcome.choices, b_outcome.choices], shape)
        similar = {} if head else _cosines(prepared, a_outcome.features, b_outcome.features)
    a, b = ((job.label, job.cell.budget.label) for job, _ in sides)
    if not stages:
        raise UserError(
            "neither strategy removes a token", got=f"budget {a[1]}", next_step="give a smaller --keep or --macs"
        )
    shares = prepared.test.relevance
    rows = spread(prepared.data, pictures)
    mask = None if shares is None else relevant(shares.cpu().numpy(), prepared.data.test.mask)
    return Comparison(prepared.cell, (a, b), stages, mask, rows, scene(prepared, rows) if pictures else None, similar)


def plan_of(plugins: tuple[str, str], request: Request, trainer: Trainer, pictures: int) -> Plan:
    """Return the plan of what `compare` would train, without writing anything."""
    plan, _ = _planned(plugins, request, trainer, pictures, Registry())
    return plan


def _planned(
    plugins: tuple[str, str], request: Request, trainer: Trainer, pictures: int, registry: Registry
) -> tuple[Plan, list[tuple[Job, Strategy]]]:
    """Load the plugin files; return the plan of the network, and the jobs of A and B with their strategies."""
    for text in request.plugins:
        if not text.endswith(".py"):
            raise UserError("--plugin", got=f"'{text}'", allowed="files with the task or the model")
        registry.load_file(Path(text))
    plan = trainer.plan(replace(request, **NETWORK), registry, pictures > 0)
    request, located = locate_model(request, plan.located)
    jobs = []
    for text in plugins:
        candidates = expand(replace(request, plugins=(text,), alone=True, single=True), registry, located)
        job, *more = {_key(job): job for job in candidates if job.requested}.values()
        if more:
            names = ", ".join(f"{candidate.label} at {candidate.cell.budget.label}" for candidate in (job, *more))
            raise UserError("compare takes two strategies, each at one budget", got=f"'{text}', which is {names}")
        jobs.append(job)
    if _key(jobs[0]) == _key(jobs[1]):
        raise UserError("A and B are the same strategy at the same budget", got=" and ".join(map(repr, plugins)))
    return plan, [(job, _load_strategy(job, registry)) for job in jobs]


def _key(job: Job) -> str:
    return canonical([job.cell.strategy.model_dump(mode="json"), job.cell.budget.model_dump(mode="json")])


def _load_strategy(job: Job, registry: Registry) -> Strategy:
    """Return the job's strategy; raise UserError unless it removes tokens in the test without training."""
    try:
        strategy = strategy_of(job, registry)
    except StrategyError as error:
        raise UserError(f"strategy '{job.label}': {error}") from error
    if not strategy.budgeted or strategy.trains_only:
        does = "removes tokens in training only" if strategy.trains_only else "chooses no tokens"
        raise UserError(f"strategy '{strategy.name}' {does}: there is nothing to compare")
    if strategy.trained:
        raise UserError(
            f"strategy '{strategy.name}' is trained together with its network, but compare uses a network that was "
            "trained without a strategy",
            next_step="look at its choices with: sparsebench show-tokens",
        )
    return strategy


class _Outcome(NamedTuple):
    """What a strategy does in the test: its choices, and for a network without a head the (n, C) pooled features."""

    choices: list[Choice]
    features: np.ndarray


def _outcome(job: Job, strategy: Strategy, prepared: Prepared, context: Context, *, head: bool) -> _Outcome:
    """Return what a strategy does in the test; `head` says whether the network has one."""
    network, setting = prepared.network, prepared.cell
    stream = seeds.seed_of("compare", setting.task.name, setting.n_train, setting.repetition, _key(job))
    try:
        budget = job.cell.budget
        if budget.schedule == AUTO:
            budget, _ = choose_schedule(job.cell, strategy, network, prepared.train, prepared.task, context, head=head)
        actor = Actor(strategy, budget, network.cost, network.grid, stream)
        if wants_images(actor):
            check_labels(actor, head=head)
            fit_on(prepared, actor, {})
        if strategy.adaptive and len(prepared.train.labels):
            calibrate(network, actor, prepared.train)
        if head:
            tested = evaluate(network, actor, prepared.test, prepared.recipe, choices=True)
            return _Outcome(tested.choices[1:], np.empty(0))
        passed = features(network, actor, prepared.test, choices=True)
        return _Outcome(passed.choices[1:], passed.outputs.astype(np.float64))
    except (Exception, SystemExit) as error:  # a user's strategy may raise anything
        raise UserError(f"strategy '{job.label}' has no result: {failure_of(error).reason}") from error


def _cosines(prepared: Prepared, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Return the (n,) cosines of each pair of (n, C) features: with A, with B, and without a strategy."""
    dense = outputs_in_test(prepared.network, None, prepared.test, prepared.test.items)

    def cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        return (one * other).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)

    return {"a_dense": cosine(a, dense), "b_dense": cosine(b, dense), "a_b": cosine(a, b)}


def _stages(choices: Sequence[list[Choice]], shape: tuple[int, int]) -> dict[int, tuple[Choice, Choice]]:
    """Return the latest choice of each side, for each block in which one of them acted."""
    all_patches = Choice(-1, np.ones(shape, dtype=bool), np.full(shape, np.nan), scored=True)
    a, b = ({choice.block: choice for choice in side} for side in choices)
    latest_a, latest_b = all_patches, all_patches
    stages = {}
    for block in sorted({*a, *b}):
        latest_a = a.get(block, latest_a)
        latest_b = b.get(block, latest_b)
        stages[block] = latest_a, latest_b
    return stages


def rows(comparison: Comparison) -> list[Row]:
    """Return a row for each block in which A or B acted; the last row is the end.

    The keys are: block, end; kept_a, kept_b (mean numbers of patches); iou, iou_low, iou_high, iou_expected;
    rank_correlation, _low, _high and _n (number of samples that have one); relevant_kept_a, relevant_kept_b
    (fractions). Missing values are None.
    """
    table, mask = [], comparison.relevant
    for block, (a, b) in comparison.stages.items():
        correlation = rank_correlation(a.scores, b.scores) if a.scored and b.scored else np.empty(0)
        shares = [None if mask is None else quality(choice.kept, choice.scores, mask)[1] for choice in (a, b)]
        table.append(
            {
                "block": block,
                "end": block == max(comparison.stages),
                "kept_a": float(a.kept.sum(axis=1).mean()),
                "kept_b": float(b.kept.sum(axis=1).mean()),
                **_interval("iou", iou(a.kept, b.kept)),
                "iou_expected": _interval("iou", expected_iou(a.kept, b.kept))["iou"],
                **_interval("rank_correlation", correlation),
                "rank_correlation_n": int((~np.isnan(correlation)).sum()),
                "relevant_kept_a": shares[0],
                "relevant_kept_b": shares[1],
            }
        )
    return table


def _interval(name: str, values: np.ndarray) -> Row:
    """Return the mean of the values that are not NaN, with its interval."""
    valid = values[~np.isnan(values)]
    interval = mean_interval(valid.tolist()) if len(valid) else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def as_json(comparison: Comparison) -> str:
    """Return the comparison as JSON: what was compared, and the rows."""
    cell, (n, N) = comparison.cell, _shape(comparison)
    a, b = ({"label": label, "budget": budget} for label, budget in comparison.sides)
    about: Row = {"task": cell.task.model_dump(mode="json"), "model": cell.model.model_dump(mode="json")}
    about |= {"n_train": cell.n_train, "samples": n, "patches": N, "a": a, "b": b}
    if comparison.cosines:
        about["cosines"] = {pair: _interval("cosine", values) for pair, values in comparison.cosines.items()}
    return json.dumps({**about, "rows": rows(comparison)}, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _shape(comparison: Comparison) -> tuple[int, int]:
    """Return the number of test samples and the number of patches."""
    n, N = next(iter(comparison.stages.values()))[0].kept.shape
    return n, N


def as_text(comparison: Comparison, *, markdown: bool = False) -> str:
    """Return the comparison as a table for a terminal, or in Markdown."""
    cell, (n, N) = comparison.cell, _shape(comparison)
    sample = "test sample" if n == 1 else "test samples"
    lines = [f"{cell.task.name}, {cell.model.name}, {cell.n_train} training samples; {n} {sample} of {N} patches"]
    lines += _names(comparison)
    body = [_cells(row) for row in rows(comparison)]
    table = tabulate(
        body,
        headers="keys",
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=["right"] * len(body[0]),
    )
    parts = ["  \n".join(lines) if markdown else "\n".join(lines), table]
    if comparison.cosines:
        parts.append(_similarity(comparison))
    parts.append(LEGEND)
    if comparison.cosines:
        parts.append(ABOUT_FEATURES)
    return "\n\n".join(parts) + "\n"


def _similarity(comparison: Comparison) -> str:
    """Return a line with the mean cosines of pooled features."""
    names = {"a_dense": "A and dense", "b_dense": "B and dense", "a_b": "A and B"}
    values = {pair: _number(_interval("cosine", cosines), "cosine") for pair, cosines in comparison.cosines.items()}
    return "cosine of features: " + ", ".join(f"{names[pair]} {value}" for pair, value in values.items())


def _names(comparison: Comparison) -> list[str]:
    return [f"{side}: {label}, {budget}" for side, (label, budget) in zip("AB", comparison.sides, strict=True)]


def _cells(row: Row) -> Row:
    cells = {
        "after block": f"{row['block']}, the end" if row["end"] else str(row["block"]),
        "A keeps": f"{row['kept_a']:.4g}",
        "B keeps": f"{row['kept_b']:.4g}",
        "IoU": _number(row, "iou"),
        "chance": _number(row, "iou_expected"),
        "rank correlation": _number(row, "rank_correlation"),
    }
    if row["relevant_kept_a"] is not None:
        cells |= {f"relevant kept by {side}": f"{row[f'relevant_kept_{side.lower()}']:.3f}" for side in "AB"}
    return cells


def _number(row: Row, key: str) -> str:
    if row[key] is None:
        return "-"
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    value = f"{row[key]:.3f}"
    return value if low is None else f"{value} [{low:.3f}, {high:.3f}]"


def figure(comparison: Comparison) -> Figure:
    """Return a figure with a column of pictures, then for each block the patches that A and B keep."""
    assert comparison.scene is not None
    about = "\n".join(_names(comparison))
    inks = {"kept by both": INKS[BOTH], "kept by A only": INKS[0], "kept by B only": INKS[1]}
    blocks = []
    for block, choices in comparison.stages.items():
        a, b = (choice.kept[comparison.rows] for choice in choices)
        columns = []
        for side, kept, other in (("A", a, b), ("B", b, a)):
            area = np.where(kept, np.where(other, BOTH, "AB".index(side)), -1)
            panels = zip(comparison.scene.pictures, comparison.scene.matters, area, strict=True)
            few, many = kept.sum(axis=1).min(), kept.sum(axis=1).max()
            count = f"{few}" if few == many else f"{few}-{many}"
            tiles = [tint(*panel, comparison.scene.grid, INKS) for panel in panels]
            columns.append((f"{side}: {count} of {kept.shape[1]}", tiles))
        values = ["neither keeps a patch" if np.isnan(value) else f"IoU {value:.2f}" for value in iou(a, b)]
        blocks.append(Block(f"after block {block}", "", columns, [(text, style.BLACK) for text in values]))
    return sheet(comparison.scene, blocks, inks, about)
