"""Show what strategies do to single test pictures: train the networks of a request, follow the patches, draw them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.models.actor import LEARNED, Actor, Pass
from sparsebench.plan.contenders import ALL, specs_of
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import Networks, official_places
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import canonical
from sparsebench.runner import devices
from sparsebench.runner import run as runs
from sparsebench.runner.devices import first_of
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context, Prepared, fit_on, prepare, wants_images
from sparsebench.runner.progress import SILENT, Callbacks
from sparsebench.runner.run_cell import deterministic, failure_of
from sparsebench.stats import style
from sparsebench.strategy.budget import AUTO, FULL
from sparsebench.strategy.plans import Keep, Merge
from sparsebench.strategy.spec import parse
from sparsebench.strategy.tokens import Resting, membership_after
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.sources.cache import telling
from sparsebench.training.steps import predictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


@dataclass(frozen=True)
class Trainer:
    """Trains the missing networks of a request and keeps their weights.

    Attributes:
        files: the user's files: pictures and initial weights.
        execution: how the cells are run.
        out: the run's folder.
        callbacks: are called with the progress.
    """

    files: Files
    execution: Execution
    out: Path
    callbacks: Callbacks = SILENT

    def plan(self, request: Request, registry: Registry, pictures: bool = False) -> Plan:
        """Return the plan of the requested cells and of the trainings that are missing, without writing anything.

        A cell with a result but without weights is trained again. Pictures of all cells are located. Cells of a network
        without a head are not run: its weights are given, and it has no classes on which it could be tested.

        Args:
            request: a request of one task with one model.
            registry: has the strategies.
            pictures: whether the task must have images.

        Raises:
            UserError: an argument is unknown, out of range, missing or unwritable.
        """
        with telling(self.callbacks.on_pictures):
            plan = runs.plan_of(replace(request, single=True), self.files, self.execution, registry, self.out)
        settings = {
            canonical([job.cell.task.model_dump(), job.cell.model.model_dump()]) for job in plan.jobs if job.requested
        }
        if len(settings) > 1:
            raise UserError(
                "only one task with one model is possible here",
                got=f"{len(settings)} of them",
                next_step="give their parameters with --task and --model, and one file of weights",
            )
        task = registry.task(plan.jobs[-1].cell.task.name)
        if pictures and task.inputs != "images":
            allowed = [cls.name for cls in registry.tasks() if cls.inputs == "images"]
            raise UserError("pictures need a task with images", got=f"'{task.name}'", allowed=allowed)
        networks = Networks(self.out, plan.summaries, self.files.networks).places({job.weights for job in plan.jobs})
        official = official_places(self.files, plan.jobs, plan.locations)
        places = {**plan.locations, **official, **networks}
        plan = replace(plan, locations=places, request=None)
        return plan if has_head(plan, registry) else replace(plan, todo=[])

    def train(self, plan: Plan, registry: Registry) -> Context:
        """Train the networks of a plan; return the context with the folder of the weights."""
        if has_head(plan, registry):
            with telling(self.callbacks.on_pictures):
                runs.carry_out(plan, self.execution, registry, self.out, self.callbacks)
        # Networks trained on a cluster are evaluated on this machine.
        device = devices.resolve_device("auto" if self.execution.dask else self.execution.device)
        return Context(RunEnvironment(self.out, first_of(device), plan.locations))


def has_head(plan: Plan, registry: Registry) -> bool:
    """Return whether the network of a plan has a head. One with given weights may have none, if it is not trained."""
    cell = plan.jobs[-1].cell
    _, task, model = registry.resolve(cell)
    if task.trains and cell.track != "frozen":
        return True
    return model.with_weights(plan.locations).classes(plan.locations) != 0


def load_cell(job: Job, registry: Registry, context: Context, *, head: bool = True) -> Prepared:
    """Return the prepared cell with its trained weights, including those of its strategy.

    Args:
        job, registry, context: see `prepare`.
        head: whether the network has a head, see `has_head`. Without one, its weights are those that the user gave.
    """
    # The trained weights replace the initial ones. Only the choice of a schedule needs these, in its own cell.
    chooses = job.cell.budget.schedule == AUTO
    bare = job.model_copy(update={"cell": job.cell.model_copy(update={"init": None}), "network": ""})
    prepared = prepare(job if chooses and head else bare, registry, context, head=head)
    module, actor = prepared.network.module, prepared.actor
    fits = actor is not None and wants_images(actor)
    if head:
        state = load_file(context.environment.weights(job.weights))
        fits = fits and not any(name.startswith(f"{LEARNED}.") for name in state)
        module.load_state_dict(state, strict=not fits)
    module.eval()
    if fits:
        assert actor is not None
        check_labels(actor, head=head)
        fit_on(prepared, actor, context.fitted)
    return prepared


def check_labels(actor: Actor, *, head: bool) -> None:
    """Raise UnsupportedError if the strategy fits on labels, and the network has no head."""
    if actor.strategy.fit_labels and not head:
        raise UnsupportedError(
            f"'{actor.strategy.name}' looks at the labels of training images, and the network has no head for classes"
        )


SIDE, BESIDE, BELOW = 1.35, 0.05, 0.17
"""Side of a picture in inches; margins beside and below it as shares of the side."""
PIXELS, DPI = 256, 150
GREY, MATTERS = "#cbd0d8", "#facc15"
TOKENS = (*(colour for colour in style.COLOURS if colour != style.COLOURS[1]), style.BLACK, "#ffffff")
"""Colours of patches that share a token: without orange, which resembles that of relevant patches."""
RIGHT, WRONG = style.COLOURS[0], style.COLOURS[3]


@dataclass(frozen=True)
class Scene:
    """n test pictures to draw.

    Attributes:
        title: task, model and number of training samples.
        grid: (rows, columns) of the patches.
        pictures: (n, height, width, 3) uint8.
        matters: (n, height, width) booleans, which pixels are relevant to the label.
        names: the group or class of each picture.
        labels: (n,) class numbers; `classes` are their names.
    """

    title: str
    grid: tuple[int, int]
    pictures: np.ndarray
    matters: np.ndarray
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]


def scene(prepared: Prepared, rows: np.ndarray) -> Scene:
    """Return the scene of the (n,) pictures `rows` of a cell's test split."""
    data, test, grid = prepared.data, prepared.data.test, prepared.network.grid
    assert grid is not None
    groups = len(data.group_names) > 1
    kinds, names = (test.groups, data.group_names) if groups else (test.labels, data.classes)
    pictures = test.inputs[rows].transpose(0, 2, 3, 1)
    share = prepared.test.relevance
    relevant = None if share is None else share[torch.from_numpy(rows)].cpu().numpy() > 0
    cell = prepared.cell
    return Scene(
        f"{cell.task.name}, {cell.model.name}, {cell.n_train} training samples",
        grid,
        pictures,
        matters(test, rows, relevant, grid),
        [names[kind] for kind in kinds[rows]],
        test.labels[rows],
        data.classes,
    )


def spread(data: Data, n: int) -> np.ndarray:
    """Return the numbers of at most n test items: the first ones of all groups, or else classes, sorted by group."""
    kinds = data.test.groups if len(data.group_names) > 1 else data.test.labels
    turn = np.empty(len(kinds), int)
    for kind in np.unique(kinds):
        turn[kinds == kind] = np.arange((kinds == kind).sum())
    rows = np.lexsort((kinds, turn))[:n]
    return rows[np.argsort(kinds[rows], kind="stable")]


def matters(split: Split, rows: np.ndarray, relevant: np.ndarray | None, grid: tuple[int, int]) -> np.ndarray:
    """Return (n, height, width) booleans, which pixels are relevant: the boxes, else the relevant patches, else none.

    Args:
        split: the split with the pictures.
        rows: (n,) numbers of the pictures.
        relevant: (n, N) which patches are relevant, or None if unknown.
        grid: (rows, columns) of the patches.
    """
    height, width = split.inputs.shape[-2:]
    if relevant is None:
        return np.zeros((len(rows), height, width), dtype=bool)
    if split.boxes is None or split.order is not None:
        patches = relevant.reshape(len(rows), *grid)
        return patches.repeat(height // grid[0], axis=1).repeat(width // grid[1], axis=2)
    top, left, tall, wide = split.boxes[rows].T[:, :, None]
    inside = [
        (low <= np.arange(length)) & (np.arange(length) < low + size)
        for low, size, length in ((top, tall, height), (left, wide, width))
    ]
    return inside[0][:, :, None] & inside[1][:, None, :]


class Ink(NamedTuple):
    """How an area is marked: an outline in a colour "#rrggbb", and a tint inside with this strength (0 to 1)."""

    colour: str
    strength: float = 0.25


def rgb(colour: str) -> np.ndarray:
    """Return the (3,) RGB values, from 0 to 255, of a colour "#rrggbb"."""
    return np.array([*bytes.fromhex(colour[1:])])


def tint(
    picture: np.ndarray,
    matters: np.ndarray,
    area: np.ndarray | None = None,
    grid: tuple[int, int] = (1, 1),
    inks: Mapping[int, Ink] | None = None,
) -> np.ndarray:
    """Return an enlarged picture with the relevant pixels outlined and areas of patches marked.

    Args:
        picture: (height, width, 3) uint8.
        matters: (height, width) booleans, which pixels are relevant.
        area: (N,) number of the area of each patch, -1 for greyed patches; None for no marks.
        grid: (rows, columns) of the patches.
        inks: how areas are outlined and tinted, by their number.
    """
    height, width = matters.shape
    scale = max(1, -(-PIXELS // height))
    large = _enlarge(picture, scale, scale)
    line = max(1, large.shape[0] // 64)
    if area is not None:
        areas = _enlarge(area.reshape(grid), scale * height // grid[0], scale * width // grid[1])
        large[areas < 0] = (large[areas < 0] + 7.0 * rgb(GREY)) / 8
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
    """Return which pixels of (height, width) area numbers are within `line` pixels of another area or the border."""
    wide = np.pad(areas, line, constant_values=-2)
    height, width = areas.shape
    ends = ((0, line), (2 * line, line), (line, 0), (line, 2 * line))
    return np.logical_or.reduce([wide[y : y + height, x : x + width] != areas for y, x in ends])


class Block(NamedTuple):
    """Columns of n pictures under one title.

    Attributes:
        about: text below the title.
        columns: pairs of a caption and n pictures; all pictures of a figure have the same size.
        below: pairs of a text below each row and its colour.
    """

    title: str
    about: str
    columns: Sequence[tuple[str, Sequence[np.ndarray]]]
    below: Sequence[tuple[str, str]] = ()


def sheet(
    scene: Scene,
    blocks: Sequence[Block],
    inks: Mapping[str, Ink],
    about: str = "",
    *,
    grey: str = "removed",
    outlined: str = "matters to the label",
) -> Figure:
    """Return a figure with the pictures, the blocks beside them, and a legend of the inks below.

    Args:
        scene: the pictures.
        blocks: the blocks, from left to right.
        inks: the inks of the blocks, by their names in the legend.
        about: text below the title.
        grey: what grey patches are; "" if there are none.
        outlined: what the outlined pixels are.
    """
    originals = [tint(picture, matters) for picture, matters in zip(scene.pictures, scene.matters, strict=True)]
    blocks = [Block("", "", [("the picture", originals)]), *blocks]
    columns = [max(1, len(block.columns)) for block in blocks]
    n_rows = len(originals)
    inches_wide = SIDE * (1 + BESIDE) * sum(columns)
    inches_high = SIDE * (1 + BELOW) * n_rows
    figure = style.new(1.3 + inches_wide, 1.3 + inches_high, DPI, layout="constrained")
    title = wrap(f"{scene.title}\n{about}".strip(), 12 * sum(columns))
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)
    axes = figure.subplots(1, len(blocks), width_ratios=columns, squeeze=False)[0]
    for axis, block in zip(axes, blocks, strict=True):
        _add_block(axis, block, originals[0].shape[:2], n_rows)
    height, _ = originals[0].shape[:2]
    middles = np.arange(n_rows) * int(height * (1 + BELOW)) + height / 2
    names = [wrap(name, 14) for name in scene.names]
    axes[0].set_yticks(middles, names, fontsize=8, parse_math=False)
    handles = _legend(inks, grey, outlined if scene.matters.any() else "")
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=7, frameon=False)
    return figure


def _add_block(axis: Axes, block: Block, size: tuple[int, int], n_rows: int) -> None:
    """Draw a block as one image, with its titles above the columns and its texts below the pictures.

    Args:
        axis: the axes of the block.
        block: the block; one without columns keeps the room of one.
        size: height and width of each picture.
        n_rows: number of pictures in a column.
    """
    height, width = size
    # A field of the grid is a picture with its margins below and beside it.
    field_height = int(height * (1 + BELOW))
    field_width = int(width * (1 + BESIDE))
    n_columns = max(1, len(block.columns))
    image = np.full((n_rows * field_height, n_columns * field_width, 3), 255, np.uint8)
    for column, (_, pictures) in enumerate(block.columns):
        for row, picture in enumerate(pictures):
            top, left = row * field_height, column * field_width
            image[top : top + height, left : left + width] = picture
    axis.imshow(image)

    _add_titles(axis, block, np.arange(len(block.columns)) * field_width + width / 2)
    middle = n_columns * field_width / 2
    for row, (text, colour) in enumerate(block.below):
        short = textwrap.shorten(text, 22 * n_columns, placeholder="...")
        y = row * field_height + 1.02 * height
        axis.text(middle, y, short, ha="center", va="top", fontsize=8, color=colour, parse_math=False)


def _add_titles(axis: Axes, block: Block, middles: np.ndarray) -> None:
    """Write a block's title, and above each column, at its x in `middles`, its caption."""
    n_columns = max(1, len(block.columns))
    title = wrap(f"{block.title}\n{block.about}".strip(), 20 * n_columns)
    axis.set_title(title, fontsize=8, weight="bold", parse_math=False)
    captions = [wrap(caption, 22) for caption, _ in block.columns]
    axis.set_xticks(middles, captions, fontsize=7, parse_math=False)
    axis.set_yticks([])
    axis.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)


def _legend(inks: Mapping[str, Ink], grey: str, outlined: str) -> list[Patch]:
    """Return the legend's patches: the inks by name, and if named grey patches and outlined pixels."""
    from matplotlib.patches import Patch

    patches = []
    for name, ink in inks.items():
        patches.append(Patch(facecolor=(ink.colour, ink.strength), edgecolor=ink.colour, linewidth=1.5, label=name))
    if grey:
        patches.append(Patch(facecolor=GREY, edgecolor=GREY, linewidth=1.5, label=grey))
    if outlined:
        patches.append(Patch(facecolor="none", edgecolor=MATTERS, linewidth=1.5, label=outlined))
    return patches


def wrap(text: str, letters: int) -> str:
    """Return the text with each of its lines wrapped to at most `letters` letters."""
    return "\n".join(textwrap.fill(line, letters) for line in text.splitlines())


@dataclass(frozen=True)
class Stage:
    """The tokens after one decision, for n pictures of N patches.

    Attributes:
        place: "the input", "block 1" or "before block 1".
        count: number of tokens after the decision.
        token: (n, N) number of the token of each patch, -1 for removed patches; None if tokens are mixtures.
    """

    place: str
    count: int
    token: np.ndarray | None


@dataclass(frozen=True)
class Shown:
    """What one strategy did to the pictures.

    Attributes:
        stages: its decisions; empty if all tokens stayed.
        predicted: (n,) predicted class numbers; empty without a result, and for a network without a head.
        why: why there is no result.
        cosines: (n,) for a network without a head, the cosines of its pooled features with those of the network without
            a strategy; otherwise empty.
    """

    label: str
    budget: str
    stages: list[Stage]
    predicted: np.ndarray
    why: str = ""
    cosines: np.ndarray = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Pictures(Scene):
    """Test pictures, and what each strategy did to them."""

    shown: list[Shown]

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG, for notebooks."""
        return style.content(figure(self))


def show(request: Request, trainer: Trainer, n: int, registry: Registry | None = None) -> Pictures:
    """Train the missing networks of a request, and return what its strategies do to n test pictures.

    The pictures are spread over the groups, or classes if there are no groups. Networks that are only starting points
    of other strategies are not shown.

    Args:
        request: one task and one repetition.
        trainer: trains the networks.
        n: maximal number of pictures.
        registry: has the plugin files that are loaded already, if any.

    Raises:
        UserError: an argument is unknown, out of range, missing or unwritable; or no strategy has a result.
    """
    registry = registry or Registry()
    plan = trainer.plan(request, registry, pictures=True)
    context = trainer.train(plan, registry)
    head = has_head(plan, registry)
    records = store.read(trainer.out) if head else {}
    outcomes, first = list[Shown](), None
    failed: list[str] = []
    arguments = [text for text in request.plugins if parse(text).name != ALL]
    requested = {spec.name for text in arguments for spec in specs_of(text, registry)}
    with deterministic():
        for job in (job for job in plan.jobs if job.requested):
            failure = records[job.cell.id].failure if head else None
            if failure is None:
                try:
                    prepared = load_cell(job, registry, context, head=head)
                    first = first or (prepared, spread(prepared.data, n))
                    outcomes.append(_choices(job, prepared, first[1], head=head))
                except (Exception, SystemExit) as error:  # a user's strategy may raise anything
                    failure = failure_of(error)
            if failure is None:
                continue
            failed.append(f"{job.label}: {failure.reason}")
            # The suite's oracles need relevant patches, which many tasks do not know.
            is_baseline = job.kind == "oracle" and job.cell.strategy.name not in requested
            if not is_baseline:
                outcomes.append(Shown(job.label, _budget(job), [], np.empty(0, int), failure.reason))
    if first is None:
        raise UserError(f"no strategy has a result; {failed[0]}")
    return Pictures(**vars(scene(*first)), shown=outcomes)


@torch.no_grad()
def _choices(job: Job, prepared: Prepared, rows: np.ndarray, *, head: bool) -> Shown:
    """Return what the strategy of a cell did to the (n,) pictures `rows` of its test split."""
    items = torch.from_numpy(rows).to(prepared.test.items.device)
    outputs, acting = prepared.test.forward(prepared.network, prepared.in_test, items, visit=0, training=False)
    stages = [] if acting is None else list(_stages(acting))
    if head:
        return Shown(job.label, _budget(job), stages, predictions(prepared.recipe, outputs).cpu().numpy())
    dense, _ = prepared.test.forward(prepared.network, None, items, visit=0, training=False)
    cosines = F.cosine_similarity(outputs.double(), dense.double(), dim=1)
    return Shown(job.label, _budget(job), stages, np.empty(0, int), cosines=cosines.cpu().numpy())


def _budget(job: Job) -> str:
    return "" if job.cell.budget == FULL else job.cell.budget.label


def _stages(acting: Pass) -> Iterator[Stage]:
    """Yield the tokens after each decision."""
    place = {"input": "the input", "block": "before block {}", "mlp": "after block {}"}.get(acting.site, "block {}")
    positions = torch.arange(acting.count, device=acting.index.device).expand(len(acting.index), -1)
    token: Tensor | None = positions
    for decision in acting.decisions:
        if isinstance(decision.plan, Resting):
            if decision.block not in acting.actor.keep:  # the count is that of the previous block in the budget
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
    """Return a picture with removed patches in grey, and patches that share a token tinted in one colour.

    Args:
        picture, matters, grid: see `tint`.
        token: (N,) number of the token of each patch, -1 for removed patches; None for no marks.
    """
    counts = np.zeros(0) if token is None else np.bincount(token[token >= 0])
    inks = {int(number): Ink(TOKENS[place % len(TOKENS)]) for place, number in enumerate(np.flatnonzero(counts > 1))}
    return tint(picture, matters, token, grid, inks)


def figure(pictures: Pictures) -> Figure:
    """Return a figure with a column of pictures, then a block for each strategy with its stages."""
    stages = [stage for outcome in pictures.shown for stage in outcome.stages]
    inks = {"patches that share a token": Ink(TOKENS[0])} if any(map(_has_shared_tokens, stages)) else {}
    return sheet(pictures, [_block(outcome, pictures) for outcome in pictures.shown], inks)


def _has_shared_tokens(stage: Stage) -> bool:
    """Return whether several patches of a picture share a token."""
    if stage.token is None:
        return False
    return any(np.bincount(row[row >= 0]).max(initial=0) > 1 for row in stage.token)


def _block(outcome: Shown, pictures: Pictures) -> Block:
    """Return one strategy's block: a column for each stage, and the predictions below the pictures."""
    if outcome.why:
        why = textwrap.shorten(f"no result: {outcome.why}", 80, placeholder=" ...")
        return Block(outcome.label, f"{outcome.budget}\n{why}", [])
    N = pictures.grid[0] * pictures.grid[1]
    all_patches = Stage("all", N, np.tile(np.arange(N), (len(pictures.pictures), 1)))
    columns = []
    for stage in outcome.stages or [all_patches]:
        tiles = []
        for row, (picture, matters) in enumerate(zip(pictures.pictures, pictures.matters, strict=True)):
            token = None if stage.token is None else stage.token[row]
            tiles.append(paint(picture, matters, token, pictures.grid))
        mixed = ", mixed" if stage.token is None else ""
        columns.append((f"{stage.place}: {stage.count} of {N}{mixed}", tiles))
    return Block(outcome.label, outcome.budget, columns, _below(outcome, pictures))


def _below(outcome: Shown, pictures: Pictures) -> list[tuple[str, str]]:
    """Return the texts below the pictures, with their colours: predictions, or without a head cosines of features."""
    if len(outcome.cosines):
        return [(f"features: cosine {cosine:.3f}", style.BLACK) for cosine in outcome.cosines]
    texts = []
    for answer, label in zip(outcome.predicted, pictures.labels, strict=True):
        word, colour = ("right", RIGHT) if answer == label else ("wrong", WRONG)
        texts.append((f"{word}: {pictures.classes[answer]}", colour))
    return texts
