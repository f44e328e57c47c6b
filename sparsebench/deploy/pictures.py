"""Networks and test pictures to look at: trained networks of a request, and pictures with patches greyed and tinted."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from sparsebench.errors import UserError
from sparsebench.models.actor import LEARNED
from sparsebench.plan.locate import Networks, places_of
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Files, How, Job, Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import canonical
from sparsebench.runner import devices
from sparsebench.runner import run as runs
from sparsebench.runner.devices import first_of
from sparsebench.runner.prepare import Context, Prepared, fit_on, prepare, wants_images
from sparsebench.runner.progress import SILENT, Callbacks
from sparsebench.stats import style
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.sources.cache import telling

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Trainer:
    """Trains what a request lacks, and keeps its weights.

    Attributes:
        files: where its pictures and first weights come from.
        how: how it is trained.
        out: the run's folder.
        callbacks: who is told.
    """

    files: Files
    how: How
    out: Path
    callbacks: Callbacks = SILENT

    def plan(self, request: Request, registry: Registry, pictures: bool = False) -> Plan:
        """Return what is to be looked at and what of it is still to be trained; nothing is written.

        What has a result but no weights is trained again. Pictures are located for all of it.

        Args:
            request: of one task with one model.
            registry: from which strategies come.
            pictures: whether its task must be one of pictures.

        Raises:
            UserError: anything unknown, out of range, missing or unwritable.
        """
        plan = runs.plan_of(replace(request, single=True), self.files, self.how, registry, self.out)
        settings = {
            canonical([job.cell.task.model_dump(), job.cell.model.model_dump()]) for job in plan.jobs if job.asked
        }
        if len(settings) > 1:
            raise UserError(
                "this takes one task with one model", got=f"{len(settings)} of them",
                next_step="name their parameters with --task and --model, and give one file of weights",
            )  # fmt: skip
        task = registry.task(plan.jobs[-1].cell.task.name)
        if pictures and task.inputs != "images":
            allowed = [cls.name for cls in registry.tasks() if cls.inputs == "images"]
            raise UserError("this needs a task of pictures", got=f"'{task.name}'", allowed=allowed)
        networks = Networks(self.out, plan.heads, self.files.networks).places({job.weights for job in plan.jobs})
        places = dict(plan.locations) | places_of(self.files, plan.jobs) | networks
        return replace(plan, locations=places, request=None)

    def train(self, request: Request, registry: Registry, pictures: bool = False) -> tuple[Plan, Context]:
        """Train what `plan` says; return what is to be looked at, and where its weights are."""
        with telling(self.callbacks.on_pictures):
            plan = self.plan(request, registry, pictures)
            runs.carry_out(plan, self.how, registry, self.out, self.callbacks)
        # What a cluster has trained is looked at here.
        device = devices.resolve_device("auto" if self.how.dask else self.how.device)
        return plan, Context(Setting(self.out, first_of(device), plan.locations))


def load_cell(job: Job, registry: Registry, context: Context) -> Prepared:
    """Return the cell with its trained weights, whatever it started from, and with what its strategy learned."""
    bare = job.model_copy(update={"cell": job.cell.model_copy(update={"init": None}), "network": ""})
    prepared = prepare(bare, registry, context)
    state, module, actor = load_file(context.setting.weights(job.weights)), prepared.network.module, prepared.actor
    fits = actor is not None and wants_images(actor) and not any(name.startswith(f"{LEARNED}.") for name in state)
    module.load_state_dict(state, strict=not fits)
    module.eval()
    if fits:
        assert actor is not None
        fit_on(prepared, actor, context.fitted)
    return prepared


SIDE, BETWEEN, APART, LEFT, BELOW, BOTTOM, LINE = 1.35, 0.07, 0.3, 1.0, 0.26, 0.5, 0.16
"""Inches: of a picture, between pictures that belong together, between those that do not, of the left margin, below
each picture, of the lower margin, and of a line."""
POINT = 0.6 / 72
"""Inches that a letter takes for each point of its size, at most."""
PIXELS, DPI = 256, 150
GONE, MATTERS = "#cbd0d8", "#facc15"


@dataclass(frozen=True)
class Scene:
    """What is to be drawn, of n test pictures.

    Attributes:
        title: task, model, and how they were trained.
        grid: (rows, columns) of the patches.
        pictures: (n, height, width, 3) uint8.
        matters: (n, height, width) booleans, what matters to the label.
        names: what each is: its group, or its class.
        labels: (n,) class numbers; `classes` their names.
    """

    title: str
    grid: tuple[int, int]
    pictures: np.ndarray
    matters: np.ndarray
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]


def scene(cell: Prepared, rows: np.ndarray) -> Scene:
    """Return those pictures of the test split of a cell."""
    data, test, grid = cell.data, cell.data.test, cell.network.grid
    assert grid is not None
    groups = len(data.group_names) > 1
    kinds, names = (test.groups, data.group_names) if groups else (test.labels, data.classes)
    pictures = test.inputs[rows].transpose(0, 2, 3, 1)
    share = cell.test.relevance
    relevant = None if share is None else share[torch.from_numpy(rows)].cpu().numpy() > 0
    setting = cell.cell
    return Scene(
        f"{setting.task.name}, {setting.model.name}, {setting.n_train} training samples", grid, pictures,
        matters(test, rows, relevant, grid), [names[kind] for kind in kinds[rows]], test.labels[rows], data.classes,
    )  # fmt: skip


def spread(data: Data, n: int) -> np.ndarray:
    """Return at most n test items, the first ones of each group or else of each class, group by group."""
    kinds = data.test.groups if len(data.group_names) > 1 else data.test.labels
    turn = np.empty(len(kinds), int)
    for kind in np.unique(kinds):
        turn[kinds == kind] = np.arange((kinds == kind).sum())
    rows = np.lexsort((kinds, turn))[:n]
    return rows[np.argsort(kinds[rows], kind="stable")]


def matters(split: Split, rows: np.ndarray, relevant: np.ndarray | None, grid: tuple[int, int]) -> np.ndarray:
    """Return (n, height, width) booleans, the boxes of what matters; patches of which some does where that is all.

    Nothing does where nobody knows what.

    Args:
        split: of pictures.
        rows: (n,) which of them.
        relevant: (n, N) which patches matter, or None.
        grid: (rows, columns) of the patches.
    """
    height, width = split.inputs.shape[-2:]
    if relevant is None:
        return np.zeros((len(rows), height, width), dtype=bool)
    if split.boxes is None or split.order is not None:
        patches = relevant.reshape(len(rows), *grid)
        return patches.repeat(height // grid[0], axis=1).repeat(width // grid[1], axis=2)
    top, left, tall, wide = split.boxes[rows].T[:, :, None]
    inside = [(low <= np.arange(length)) & (np.arange(length) < low + size)
              for low, size, length in ((top, tall, height), (left, wide, width))]  # fmt: skip
    return inside[0][:, :, None] & inside[1][:, None, :]


class Ink(NamedTuple):
    """How an area is marked: its outline has the colour, "#rrggbb", and the share `strength` of its inside."""

    colour: str
    strength: float = 0.25


def rgb(colour: str) -> np.ndarray:
    """Return the (3,) RGB of a colour, "#rrggbb", from 0 to 255."""
    return np.array([*bytes.fromhex(colour[1:])])


def tint(
    picture: np.ndarray,
    matters: np.ndarray,
    area: np.ndarray | None = None,
    grid: tuple[int, int] = (1, 1),
    inks: Mapping[int, Ink] | None = None,
) -> np.ndarray:
    """Return a picture, enlarged, with what matters outlined and with what became of its patches.

    Args:
        picture: (height, width, 3) uint8.
        matters: (height, width) booleans.
        area: (N,) which area each patch is in, -1 for one that is greyed; None for all as they were.
        grid: (rows, columns) of the patches.
        inks: of the areas that are outlined and tinted, patches of one together.
    """
    height, width = matters.shape
    scale = max(1, -(-PIXELS // height))
    large = _enlarge(picture, scale, scale)
    line = max(1, large.shape[0] // 64)
    if area is not None:
        areas = _enlarge(area.reshape(grid), scale * height // grid[0], scale * width // grid[1])
        large[areas < 0] = (large[areas < 0] + 7.0 * rgb(GONE)) / 8
        edges = _edges(areas, line)
        for number, ink in (inks or {}).items():
            inside = areas == number
            large[inside] = (1 - ink.strength) * large[inside] + ink.strength * rgb(ink.colour)
            large[inside & edges] = rgb(ink.colour)
    large[_edges(_enlarge(matters, scale, scale).astype(int), line) & _enlarge(matters, scale, scale)] = rgb(MATTERS)
    return large


def _enlarge(values: np.ndarray, down: int, across: int) -> np.ndarray:
    return values.repeat(down, axis=0).repeat(across, axis=1)


def _edges(areas: np.ndarray, line: int) -> np.ndarray:
    """Return which pixels of (height, width) numbered areas are within `line` pixels of another area or the rim."""
    wide = np.pad(areas, line, constant_values=-2)
    height, width = areas.shape
    ends = ((0, line), (2 * line, line), (line, 0), (line, 2 * line))
    return np.logical_or.reduce([wide[y : y + height, x : x + width] != areas for y, x in ends])


@dataclass(frozen=True)
class Block:
    """Columns of n pictures that belong together, under one title.

    Attributes:
        about: below the title.
        columns: captions with their pictures.
        below: a text below each row, with its colour.
    """

    title: str
    about: str
    columns: Sequence[tuple[str, Sequence[np.ndarray]]]
    below: Sequence[tuple[str, str]] = ()

    @property
    def width(self) -> float:
        """Inches."""
        return max(1, len(self.columns)) * (SIDE + BETWEEN) - BETWEEN


def sheet(scene: Scene, blocks: Sequence[Block], inks: Mapping[str, Ink], about: str = "") -> Figure:
    """Return a figure: the pictures themselves, the blocks beside them, and below them what the inks mean.

    Args:
        scene: the pictures.
        blocks: what was done to them.
        inks: of the blocks, by what they mean.
        about: below the title.
    """
    from matplotlib.patches import Patch

    plain = [tint(picture, matters) for picture, matters in zip(scene.pictures, scene.matters, strict=True)]
    blocks = [Block("", "", [("the picture", plain)]), *blocks]
    width = LEFT + sum(block.width + APART for block in blocks)
    title, about = wrap(scene.title, width - LEFT, 10), wrap(about, width - LEFT, 8)
    heads = [(wrap(block.title, block.width, 8), wrap(block.about, block.width, 7)) for block in blocks]
    lines = max(len(f"{head}\n{more}".strip().splitlines()) for head, more in heads)
    top = 0.5 + LINE * (title.count("\n") + len(about.splitlines()) + lines)
    height = top + len(plain) * (SIDE + BELOW) + BOTTOM
    figure = style.new(width, height, DPI)

    def text(x: float, y: float, words: str, size: int, **options: Any) -> None:
        layout = {"ha": "center", "va": "bottom", "parse_math": False, **options}
        figure.text(x / width, 1 - y / height, words, fontsize=size, **layout)

    text(0.15, 0.1, title, 10, ha="left", va="top", weight="bold")
    text(0.15, 0.15 + LINE * (1 + title.count("\n")), about, 8, ha="left", va="top")
    rows, left = top + (SIDE + BELOW) * np.arange(len(plain)), LEFT
    for row, name in zip(rows, scene.names, strict=True):
        text(LEFT - 0.1, row + SIDE / 2, wrap(name, LEFT - 0.2, 8), 8, ha="right", va="center")
    for block, (head, more) in zip(blocks, heads, strict=True):
        middle = left + block.width / 2
        text(middle, top - 0.2, more, 7)
        text(middle, top - 0.2 - 0.13 * len(more.splitlines()), head, 8, weight="bold")
        for number, (caption, pictures) in enumerate(block.columns):
            x = left + number * (SIDE + BETWEEN)
            text(x + SIDE / 2, top - 0.06, caption, 7)
            for row, pixels in zip(rows, pictures, strict=True):
                axis = figure.add_axes((x / width, 1 - (row + SIDE) / height, SIDE / width, SIDE / height))
                axis.imshow(pixels)
                axis.set_axis_off()
        for row, (words, colour) in zip(rows, block.below, strict=False):
            fits = textwrap.shorten(words, int(block.width / (POINT * 8)), placeholder="...")
            text(middle, row + SIDE + 0.03, fits, 8, va="top", color=colour)
        left += block.width + APART
    marks: list[tuple[Any, str, str]] = [((ink.colour, ink.strength), ink.colour, says) for says, ink in inks.items()]
    marks += [(GONE, GONE, "removed"), ("none", MATTERS, "matters to the label")]
    handles = [Patch(facecolor=face, edgecolor=edge, linewidth=1.5, label=says) for face, edge, says in marks]
    figure.legend(handles=handles, loc="lower left", ncols=3, fontsize=7, frameon=False)
    return figure


def wrap(text: str, width: float, size: int) -> str:
    """Return the text, whose lines stay apart, on as many lines as `width` inches make it need."""
    most = max(4, int(width / (POINT * size)))
    return "\n".join(textwrap.fill(line, most) for line in text.splitlines())
