"""What strategies do to single test pictures: what became of their patches, choice by choice, as data and drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparsebench.deploy.pictures import Block, Ink, Scene, Trainer, load_cell, scene, sheet, spread, tint
from sparsebench.errors import UserError
from sparsebench.models.actor import Pass
from sparsebench.plan.request import Job, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.runner.prepare import Prepared
from sparsebench.runner.run_cell import failure_of, one_thread
from sparsebench.stats import style
from sparsebench.strategy.budget import FULL
from sparsebench.strategy.plans import Keep, Merge
from sparsebench.strategy.tokens import Resting, membership_after
from sparsebench.training.steps import predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = (*style.COLOURS, style.BLACK, "#ffffff")
RIGHT, WRONG = style.COLOURS[0], style.COLOURS[3]


@dataclass(frozen=True)
class Stage:
    """The tokens after one choice, of n pictures of N patches.

    Attributes:
        place: "input", "block 1", "before block 1".
        count: tokens that went on.
        token: (n, N) which of them each patch is in, -1 for none; None where patches are mixed.
    """

    place: str
    count: int
    token: np.ndarray | None


@dataclass(frozen=True)
class Shown:
    """What one strategy did.

    Attributes:
        stages: each choice; none where all tokens stayed.
        predicted: (n,) class numbers at the end; empty where it has no result.
        why: why not.
    """

    label: str
    budget: str
    stages: list[Stage]
    predicted: np.ndarray
    why: str = ""


@dataclass(frozen=True)
class Pictures(Scene):
    """Test pictures, and what each strategy did to them."""

    shown: list[Shown]

    def _repr_png_(self) -> bytes:
        """Return the picture, as notebooks show it."""
        return draw(self)


def show(request: Request, trainer: Trainer, n: int) -> Pictures:
    """Train what a request lacks for its pictures, and return what its strategies do to n pictures of the test split.

    The pictures are spread over its groups or else its classes. What only other strategies start from is not shown.

    Args:
        request: of one task and one repetition.
        trainer: trains it.
        n: the most pictures.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable, or no strategy has a result.
    """
    registry = Registry()
    plan, context = trainer.train(request, registry, pictures=True)
    records, outcomes, first = store.read(trainer.out), list[Shown](), None
    with one_thread():
        for job in (job for job in plan.jobs if job.asked):
            failure = records[job.cell.id].failure
            if failure is None:
                try:
                    prepared = load_cell(job, registry, context)
                    first = first or (prepared, spread(prepared.data, n))
                    outcomes.append(_choices(job, prepared, first[1]))
                except (Exception, SystemExit) as error:  # a strategy is a stranger's code and may raise anything
                    failure = failure_of(error)
            if failure is not None:
                outcomes.append(Shown(job.label, _budget(job), [], np.empty(0, int), failure.reason))
    if first is None:
        raise UserError(f"no strategy has a result; {outcomes[0].label}: {outcomes[0].why}")
    return Pictures(**vars(scene(*first)), shown=outcomes)


@torch.no_grad()
def _choices(job: Job, cell: Prepared, rows: np.ndarray) -> Shown:
    items = torch.from_numpy(rows).to(cell.test.items.device)
    outputs, acting = cell.test.forward(cell.network, cell.in_test, items, visit=0, training=False)
    stages = [] if acting is None else list(_stages(acting))
    return Shown(job.label, _budget(job), stages, predictions(cell.recipe, outputs).cpu().numpy())


def _budget(job: Job) -> str:
    return "" if job.cell.budget == FULL else job.cell.budget.label


def _stages(acting: Pass) -> Iterator[Stage]:
    """Yield what became of the patches at each choice."""
    place = {"input": "the input", "attention": "block {}", "block": "before block {}"}[acting.site]
    positions = torch.arange(acting.count, device=acting.index.device).expand(len(acting.index), -1)
    token: Tensor | None = positions
    for decision in acting.decisions:
        if isinstance(decision.plan, Resting):
            if decision.block not in acting.actor.keep:  # as many take part as in the block of the budget before it
                continue
            token = membership_after(Keep(decision.plan.active), positions, acting.count)
        elif token is not None and isinstance(decision.plan, Keep | Merge):
            token = membership_after(decision.plan, token, decision.before.shape[1])
        else:
            token = None
        numbers = None if token is None else token.cpu().numpy()
        yield Stage(place.format(decision.block), decision.after.shape[1], numbers)


def paint(
    picture: np.ndarray, matters: np.ndarray, token: np.ndarray | None = None, grid: tuple[int, int] = (1, 1)
) -> np.ndarray:
    """Return a picture in which patches that are in no token are greyed, and those that share one are tinted together.

    Args:
        picture, matters, grid: see `pictures.tint`.
        token: (N,) which token each patch is in, -1 for none; None for all as they were.
    """
    counts = np.zeros(0) if token is None else np.bincount(token[token >= 0])
    inks = {int(number): Ink(TOKENS[turn % len(TOKENS)]) for turn, number in enumerate(np.flatnonzero(counts > 1))}
    return tint(picture, matters, token, grid, inks)


def draw(pictures: Pictures, form: str = "png") -> bytes:
    """Return the picture as one of `style.FORMS`; the same pictures give the same bytes."""
    return style.content(figure(pictures), form)


def figure(pictures: Pictures) -> Figure:
    """Return the figure: a column for the pictures, then each strategy with its stages."""
    tokens = (stage.token for outcome in pictures.shown for stage in outcome.stages if stage.token is not None)
    shares = any(np.bincount(row[row >= 0]).max(initial=0) > 1 for token in tokens for row in token)
    inks = {"patches that share a token": Ink(TOKENS[0])} if shares else {}
    return sheet(pictures, [_block(outcome, pictures) for outcome in pictures.shown], inks)


def _block(outcome: Shown, pictures: Pictures) -> Block:
    """Return one strategy's pictures, stage by stage, with what the network says in the end below them."""
    if outcome.why:
        why = textwrap.shorten(f"no result: {outcome.why}", 80, placeholder=" ...")
        return Block(outcome.label, f"{outcome.budget}\n{why}", [])
    N, columns = pictures.grid[0] * pictures.grid[1], []
    for stage in outcome.stages or [Stage("all", N, np.tile(np.arange(N), (len(pictures.pictures), 1)))]:
        tiles = [
            paint(picture, matters, None if stage.token is None else stage.token[row], pictures.grid)
            for row, (picture, matters) in enumerate(zip(pictures.pictures, pictures.matters, strict=True))
        ]
        mixed = ", mixed" if stage.token is None else ""
        columns.append((f"{stage.place}: {stage.count} of {N}{mixed}", tiles))
    below = [
        (f"{'right' if answer == label else 'wrong'}: {pictures.classes[answer]}", RIGHT if answer == label else WRONG)
        for answer, label in zip(outcome.predicted, pictures.labels, strict=True)
    ]
    return Block(outcome.label, outcome.budget, columns, below)
