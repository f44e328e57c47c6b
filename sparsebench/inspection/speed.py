"""Measure the speed of networks with strategies against the dense network, eager and compiled; write files and a plot.

Networks are called in turn and compared call by call, so that slow phases of the machine affect all of them.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.sparse_model import SparseModel
from sparsebench.errors import UnsupportedError, UserError, one_line, plain
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.plan.contenders import settings_of
from sparsebench.plan.forecast import Forecast
from sparsebench.plan.jobs import Job
from sparsebench.plan.plan import Plan
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell
from sparsebench.records.table import setting_text
from sparsebench.runner.prepare import strategy_of
from sparsebench.runner.process import peak
from sparsebench.runner.run_cell import deterministic
from sparsebench.stats import style
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import label
from sparsebench.tasks.base import Data, Split
from sparsebench.training.evaluation import TIMED_BATCH, clock, first_batch, seconds_per_batch
from sparsebench.training.steps import Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("eager", "compiled")
DENSE = "dense"
NOISE = 0.03
ROW_HEIGHT, MOST_HEIGHT = 0.2, 100
"""Inches of a row of the picture, and of the whole picture at most."""


@dataclass(frozen=True)
class Row:
    """One network at one batch size and precision, eager or compiled.

    Attributes:
        network: name of the architecture.
        strategy, budget: as in records and boards; dense has no budget.
        mode: "eager" or "compiled"; on a GPU compiled networks use CUDA graphs, so the CPU has no work during a call.
        image: side of an image in pixels.
        parameters: number of parameters, including those of the strategy.
        macs, macs_ratio: MACs of one image, and divided by those of the dense network.
        tokens: number of patch tokens after the last block.
        latency, latency_p95: seconds per batch, median and 95th percentile.
        images_per_s: batch size divided by latency.
        speed_up: over the eager dense network with the same batch size and precision, median over rounds.
        speed_up_compiled: the same over the compiled dense network.
        choice: seconds per batch in the strategy's `plan` with the fields that it reads; None if dense or compiled.
        memory: peak memory of the GPU in bytes; None on a CPU.
        spread: difference from 1 of the ratio of the dense network to itself, measured twice.
        drift: difference from 1 of the ratio of `speed_up` to the ratio of `images_per_s` to that of the dense network.
            It is large if the speed of the machine changed between or within rounds.
        problem: why there are no times, or "".
    """

    network: str
    strategy: str
    budget: str
    mode: str
    precision: str
    batch: int
    device: str
    image: int
    parameters: int
    macs: float
    macs_ratio: float
    tokens: float
    latency: float | None = None
    latency_p95: float | None = None
    images_per_s: float | None = None
    speed_up: float | None = None
    speed_up_compiled: float | None = None
    choice: float | None = None
    memory: int | None = None
    spread: float | None = None
    drift: float | None = None
    problem: str = ""

    @property
    def label(self) -> str:
        """The strategy with its budget."""
        return f"{self.strategy}, {self.budget}" if self.budget else self.strategy

    @property
    def share(self) -> float | None:
        """Speed-up as a share of the speed-up that the MACs suggest."""
        return None if self.speed_up is None else self.speed_up * self.macs_ratio

    @property
    def marks(self) -> list[str]:
        """Warnings: a speed-up larger than the MACs suggest, a spread over 3 %, or a drift over 3 %.

        The speed-up is over the dense network in the same mode, because compiling alone makes a network faster.
        """
        speed_up = self.speed_up_compiled if self.mode == "compiled" else self.speed_up
        over = self.strategy != DENSE and speed_up is not None and speed_up * self.macs_ratio > 1
        wide = self.spread is not None and self.spread > NOISE
        drifts = self.drift is not None and self.drift > NOISE
        return (
            ["faster than its MACs"] * over + ["spread over 3 %"] * wide + ["images/s and speed-up disagree"] * drifts
        )


@dataclass
class _Runner:
    """A network in one mode and its measurements, see `Row`; `again` marks the second runner of the dense network."""

    network: SparseModel
    mode: str
    call: Callable[[Tensor], Any]
    seconds: list[float] = field(default_factory=list)
    choice: float | None = None
    memory: int | None = None
    problem: str = ""
    again: bool = False


def measure(
    models: Mapping[str, nn.Module],
    strategies: Sequence[str],
    *,
    batches: Sequence[int] = (1, 8, 32),
    modes: Sequence[str] = MODES,
    precisions: Sequence[str] = ("float32",),
    rounds: int = 20,
    device: str = "cpu",
) -> Iterator[Row]:
    """Return an iterator that measures and yields a row for each network, strategy, mode, precision and batch size.

    The dense network is always measured in both modes. If a network does not fit in memory, or cannot be compiled, the
    row has the reason.

    Args:
        models: timm models by name.
        strategies: values of `--plugin`; several values of a parameter or a budget are several strategies.
        batches, modes, precisions: see `Row`.
        rounds: number of calls of each network.
        device: "cpu" or "cuda:i".

    Raises:
        UserError: a strategy or a value is unknown.
    """
    if not batches or min(batches) < 1:
        raise UserError("batch sizes", got=list(batches), allowed="1 or more")
    registry = Registry()
    settings = [setting for words in (DENSE, *strategies) for setting in settings_of(words, registry)]
    networks = {name: [_sparse(model, *setting) for setting in settings] for name, model in models.items()}

    def rows() -> Iterator[Row]:
        for name, sparse in networks.items():
            sparse = [network.eval().to(device) for network in sparse]
            for precision, batch in itertools.product(precisions, batches):
                torch.compiler.reset()
                runners = list(_runners(sparse, modes, device))
                _take_turns(runners, PRECISIONS[precision], batch, rounds, device)
                shown = (runner for runner in runners if not runner.again)
                yield from (_row(name, precision, batch, device, runner, runners) for runner in shown)

    return rows()


def _sparse(model: nn.Module, strategy: Strategy, budget: Budget | None) -> SparseModel:
    """Return a network with a strategy that shares the model's weights; weights of the strategy are random."""
    learned = RANDOM if strategy.trained or strategy.fits() else None
    clone = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    return apply(clone, strategy, learned=learned, **(budget.model_dump(exclude_unset=True) if budget else {}))


def _runners(networks: Sequence[SparseModel], modes: Sequence[str], device: str) -> Iterator[_Runner]:
    """Yield each network in each mode, and the first, dense network twice in both modes."""
    compiled = partial(torch.compile, dynamic=False, **({} if device == "cpu" else {"mode": "reduce-overhead"}))
    for mode in MODES:
        for place, network in enumerate(networks if mode in modes else networks[:1]):
            call: Any = network if place else network.model
            call = call if mode == "eager" else compiled(call)
            yield _Runner(network, mode, call)
            if place == 0:
                yield _Runner(network, mode, call, again=True)


def _take_turns(runners: list[_Runner], kind: torch.dtype | None, batch: int, rounds: int, device: str) -> None:
    """Call the runners in turn and measure them; each round begins with another runner."""
    rng = torch.Generator().manual_seed(0)
    try:
        pixels = torch.randn(batch, *runners[0].network._network.pixels, generator=rng).to(device)
    except (MemoryError, RuntimeError) as error:
        for runner in runners:
            runner.problem = _problem(error, runner.mode)
        return
    for runner in runners:
        for _ in range(2):
            _call(runner, pixels, kind)
    for turn in range(rounds):
        first = turn % len(runners)
        for runner in runners[first:] + runners[:first]:
            if (seconds := _call(runner, pixels, kind)) is not None:
                runner.seconds.append(seconds)
    for runner in runners:
        if runner.call is runner.network:
            _time_choices(runner, pixels, kind, min(rounds, 5))


def _call(runner: _Runner, pixels: Tensor, kind: torch.dtype | None) -> float | None:
    """Call the network once and return the seconds; after an error, set `problem` and return None."""
    if runner.problem:
        return None
    try:
        if pixels.is_cuda:
            torch.cuda.reset_peak_memory_stats(pixels.device)
        start = clock(pixels.device)
        with torch.inference_mode(), torch.autocast(pixels.device.type, kind, enabled=kind is not None):
            runner.call(pixels)
        seconds = clock(pixels.device) - start
    except Exception as error:  # the compiler and strategies raise many types
        runner.problem = _problem(error, runner.mode)
        return None
    if pixels.is_cuda:
        runner.memory = max(torch.cuda.max_memory_allocated(pixels.device), runner.memory or 0)
    return seconds


def _problem(error: BaseException, mode: str) -> str:
    """Return in one line why there are no times."""
    text = one_line(error)[:200]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return "does not fit the memory"
    return f"cannot be compiled: {text}" if mode == "compiled" else f"failed: {text}"


def _time_choices(runner: _Runner, pixels: Tensor, kind: torch.dtype | None, rounds: int) -> None:
    """Measure the time of the strategy's decisions, in separate calls, because they then wait for the GPU."""
    strategy = runner.network._actor.strategy
    durations: list[float] = []
    plan = strategy.plan

    def stopwatch(*args: Any, **kwargs: Any) -> Any:
        start = clock(pixels.device)
        result = plan(*args, **kwargs)
        durations[-1] += clock(pixels.device) - start
        return result

    object.__setattr__(strategy, "plan", stopwatch)
    try:
        for _ in range(rounds):
            durations.append(0.0)
            _call(runner, pixels, kind)
    finally:
        object.__delattr__(strategy, "plan")
    if not runner.problem:
        runner.choice = statistics.median(durations)


def _row(name: str, precision: str, batch: int, device: str, runner: _Runner, runners: Sequence[_Runner]) -> Row:
    """Return the row of a runner, compared with the dense networks among all runners."""
    network, strategy = runner.network, runner.network._actor.strategy
    title = label(strategy.name, strategy.model_dump(mode="json", exclude_defaults=True))
    budget = network._actor.budget.label if strategy.budgeted else ""
    parameters = sum(weight.numel() for weight in network.parameters())
    machine = device if device == "cpu" else torch.cuda.get_device_name(device)
    dense = {mode: [other for other in runners if other.mode == mode][:2] for mode in MODES}
    times: dict[str, Any] = {}
    if not runner.problem:
        latency = statistics.median(runner.seconds)
        itself = _ratio(*dense[runner.mode])
        times = {
            "latency": latency,
            "latency_p95": float(np.percentile(runner.seconds, 95, method="higher")),
            "images_per_s": batch / latency,
            "speed_up": _ratio(dense["eager"][0], runner),
            "speed_up_compiled": _ratio(dense["compiled"][0], runner),
            "spread": None if itself is None else abs(itself - 1),
            "drift": _drift(dense["eager"][0], runner),
        }
    return Row(
        name,
        title,
        budget,
        runner.mode,
        precision,
        batch,
        machine,
        network._network.pixels[1],
        parameters,
        network.macs,
        network.macs_ratio,
        network.tokens[-1],
        choice=runner.choice,
        memory=runner.memory,
        problem=runner.problem,
        **times,
    )


def _ratio(over: _Runner, under: _Runner) -> float | None:
    """Return the median over rounds of the ratios of two runners' times; None if one was not measured."""
    if over.problem or under.problem:
        return None
    return statistics.median(a / b for a, b in zip(over.seconds, under.seconds, strict=True))


def _drift(dense: _Runner, runner: _Runner) -> float | None:
    """Return the difference from 1 of the speed-up over the ratio of the median times; None if one was not measured."""
    speed_up = _ratio(dense, runner)
    if speed_up is None:
        return None
    return abs(speed_up * statistics.median(runner.seconds) / statistics.median(dense.seconds) - 1)


def expect_tests(plan: Plan, registry: Registry, device: str) -> tuple[Forecast, int]:
    """Return the expected times of a plan, and the memory of a process in bytes.

    The plan must only have tests of trained weights. A batch of each dense network is timed here, with random weights;
    with a strategy the time is multiplied by its share of the MACs. The memory is the peak of this process so far.
    """
    timed: dict[str, tuple[float, Network]] = {}

    def prior(job: Job) -> float:
        key = setting_text(job.cell)
        if key not in timed:
            timed[key] = _time_dense(job.cell, plan, registry, device)
        seconds, network = timed[key]
        try:
            actor = Actor(strategy_of(job, registry), job.cell.budget, network.cost, network.grid, 0)
        except UnsupportedError:  # the run will say so
            return seconds
        return float(seconds * actor.spent(tuple(actor.keep.values())))

    with deterministic():
        expected = Forecast(plan.whole, plan.summaries.values(), prior)
    return expected, peak()


def _time_dense(cell: Cell, plan: Plan, registry: Registry, device: str) -> tuple[float, Network]:
    """Return the seconds of a cell's test without a strategy, from one batch of black pictures, and the network."""
    _, task, model = registry.resolve(cell)
    shapes = [array.shape for array in task.pictures(cell.n_train, cell.repetition, plan.locations)]
    n_pictures = sum(shape[0] for shape in shapes)
    size = shapes[0][1:]

    labels = np.zeros(0, np.int64)
    empty = Split(np.zeros((0, *size), np.uint8), labels, labels)
    network = model.located(plan.locations).build(Data(empty, empty, task.known_classes(plan.locations) or ()), 0)
    network.module.to(device)

    inputs = torch.zeros(TIMED_BATCH, *size, dtype=torch.uint8, device=device)
    targets = torch.zeros(TIMED_BATCH, dtype=torch.int64, device=device)
    samples = Samples(inputs, targets, None)
    batch, durations = seconds_per_batch(network, None, samples, first_batch(network, samples), repeats=3)
    return n_pictures * statistics.median(durations) / batch, network


def lines(rows: Iterable[Row]) -> str:
    """Return one line of JSON for each row, with `share` and `marks`."""
    return "".join(json.dumps({**asdict(row), "share": row.share, "marks": row.marks}) + "\n" for row in rows)


def timm_csv(rows: Iterable[Row]) -> str:
    """Return the rows with times as CSV with the header of timm's tables of inference speed.

    Step times are in milliseconds, parameters in millions. Activations, infer_macts, are not counted: empty.
    """
    import pandas as pd

    table = [
        {
            "model": f"{row.network}+{row.label}+{row.mode}+{row.precision}",
            "infer_img_size": row.image,
            "infer_samples_per_sec": round(row.batch / row.latency, 2),
            "infer_step_time": round(1000 * row.latency, 3),
            "infer_batch_size": row.batch,
            "param_count": round(row.parameters / 1e6, 2),
            "infer_gmacs": round(row.macs / 1e9, 2),
            "infer_macts": "",
        }
        for row in rows
        if row.latency is not None
    ]
    return pd.DataFrame(table).to_csv(index=False, lineterminator="\n")


def draw(rows: Iterable[Row]) -> bytes:
    """Return a PNG of the speed-ups over the eager dense network.

    Each strategy with its budget is a row of dots, one dot for each mode. There is a panel for each batch size, and for
    each network and precision. A grey bar is the speed-up that the MACs suggest.
    """
    rows = list(rows)
    labels = list(dict.fromkeys(row.label for row in rows))
    batches = sorted({row.batch for row in rows})
    settings = list(dict.fromkeys((row.network, row.precision) for row in rows))
    places = {label: place for place, label in enumerate(labels)}
    height = min(MOST_HEIGHT, 1.2 + len(settings) * (0.6 + ROW_HEIGHT * len(labels)))
    with style.sheet():
        figure = style.new(3 + 2.2 * len(batches), height, layout="constrained")
        panels = figure.subplots(len(settings), len(batches), sharex=True, sharey=True, squeeze=False)
        for setting, line in zip(settings, panels, strict=True):
            for batch, axes in zip(batches, line, strict=True):
                here = [row for row in rows if (row.network, row.precision) == setting and row.batch == batch]
                axes.set_title(f"{setting[0]}\n{setting[1]}, batch {batch}", fontsize=8)
                _draw_panel(axes, here, places)
        first = panels[0, 0]
        first.set_yticks(range(len(labels)), [plain(label, 60) for label in labels])
        first.set_ylim(len(labels) - 0.5, -0.5)
        first.set_xlim(left=0)
        for axes in panels[-1]:
            axes.set_xlabel("speed-up")
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return style.content(figure)


def _draw_panel(axes: Axes, rows: Sequence[Row], places: Mapping[str, int]) -> None:
    """Draw the speed-ups of rows with one network, precision and batch size, at the places of their labels."""
    axes.axvline(1, color=style.DARK, linewidth=style.THIN)
    suggested = {places[row.label]: 1 / row.macs_ratio for row in rows}
    axes.plot(
        list(suggested.values()), list(suggested), "|", color=style.GREY, markersize=9, label="as the MACs suggest"
    )
    for number, mode in enumerate(MODES):
        dots = {places[row.label]: row.speed_up for row in rows if row.mode == mode and row.speed_up is not None}
        look = style.series(number)
        axes.plot(list(dots.values()), list(dots), look.marker, color=look.color, label=f"{mode}, over eager dense")
