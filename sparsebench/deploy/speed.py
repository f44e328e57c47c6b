"""How fast strategies make a network, beside the dense one, eager and compiled: measured, as files and as a picture.

Networks take turns, so that what slows the machine slows all of them, and are compared turn by turn.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.sparse_model import SparseModel
from sparsebench.errors import UserError, one_line
from sparsebench.plan.contenders import settings_of
from sparsebench.plan.plan import Expected, Plan
from sparsebench.plan.request import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records.table import setting_text
from sparsebench.runner.process import peak
from sparsebench.runner.run_cell import one_thread
from sparsebench.stats import style
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import fill, label
from sparsebench.tasks.base import Data, Split
from sparsebench.training.loop import TIMED_BATCH, clock, first_batch, seconds_per_batch
from sparsebench.training.steps import Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("eager", "compiled")
DENSE, AGAIN = "dense", "dense again"
NOISE = 0.03


@dataclass(frozen=True)
class Row:
    """One network at one batch size and precision, eager or compiled.

    Attributes:
        network: its architecture.
        strategy, budget: as records and boards name them; dense has no budget.
        mode: eager or compiled; on a GPU that is with CUDA graphs, which leave nothing for the host to do.
        image: pixels of a side.
        parameters: of the network, those that the strategy learns included.
        macs: MACs of one image; `macs_ratio` as a share of the dense ones.
        tokens: patch tokens after the last block.
        latency, latency_p95: seconds a batch, median and 95th percentile.
        images_per_s: the batch over its latency.
        speed_up: over the eager dense network of the same batch and precision: the median of the ratios turn by turn;
            `speed_up_compiled` over the compiled one.
        choice: seconds a batch in the strategy's `plan`, with what it reads; None for dense or compiled networks.
        memory: most bytes of the GPU in use; None on a CPU.
        spread: how far the same dense network, measured again, is from a ratio of 1 to itself.
        problem: why there are no times, or nothing.
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
    problem: str = ""

    @property
    def label(self) -> str:
        """The strategy with its budget."""
        return f"{self.strategy}, {self.budget}" if self.budget else self.strategy

    @property
    def share(self) -> float | None:
        """What is reached of the speed-up that the MACs would give."""
        return None if self.speed_up is None else self.speed_up * self.macs_ratio

    @property
    def marks(self) -> list[str]:
        """What is odd: a speed-up beyond that of the MACs, a spread over 3 %.

        The speed-up is held against the dense network of the same mode: compiling alone makes a network faster.
        """
        speed_up = self.speed_up_compiled if self.mode == "compiled" else self.speed_up
        over = self.strategy != DENSE and speed_up is not None and speed_up * self.macs_ratio > 1
        wide = self.spread is not None and self.spread > NOISE
        return ["faster than its MACs"] * over + ["spread over 3 %"] * wide


@dataclass
class _Runner:
    """A network in one mode: what is called, its row so far and its times."""

    name: str
    call: Callable[[Tensor], Any]
    row: Row
    sparse: SparseModel | None = None
    seconds: list[float] = field(default_factory=list)


def measure(
    models: Mapping[str, nn.Module], strategies: Sequence[str], *, batches: Sequence[int] = (1, 8, 32),
    modes: Sequence[str] = MODES, precisions: Sequence[str] = ("float32",), rounds: int = 20, device: str = "cpu",
) -> Iterator[Row]:  # fmt: skip
    """Return a row for each network, strategy, mode, precision and batch size, as they are measured.

    The compiled dense network is always among them. What does not fit the memory, or cannot be compiled, has a row
    that says so.

    Args:
        models: timm models by their names.
        strategies: words of `--plugin`; several values of a parameter or a budget are several strategies.
        batches, modes, precisions: see `Row`.
        rounds: how often each network is called.
        device: "cpu" or "cuda:i".

    Raises:
        UserError: a strategy or a value that is not known.
    """
    if not batches or min(batches) < 1:
        raise UserError("batch sizes", got=list(batches), allowed="1 or more")
    registry = Registry()
    settings = [setting for words in strategies for setting in settings_of(words, registry)]
    sparse = {name: [_sparse(model, *pair) for pair in settings] for name, model in models.items()}

    def rows() -> Iterator[Row]:
        for name, model in models.items():
            model = model.eval().to(device)
            networks = [network.eval().to(device) for network in sparse[name]]
            dense = _sparse(model, registry.strategy(DENSE).cls(), None)
            base = Row(
                name, DENSE, "", "eager", "", 0, device if device == "cpu" else torch.cuda.get_device_name(device),
                dense._network.pixels[1], _parameters(model), dense.macs, 1.0, dense._actor.cost.tokens,
            )  # fmt: skip
            for precision in precisions:
                for batch in batches:
                    torch.compiler.reset()
                    runners = list(_runners(model, networks, modes, replace(base, precision=precision, batch=batch)))
                    yield from _times(runners, rounds, device, dense._network.pixels)

    return rows()


def _sparse(model: nn.Module, strategy: Strategy, budget: Budget | None) -> SparseModel:
    """Return the network, its weights shared, with a strategy; what that learns is random."""
    learned = RANDOM if strategy.trained or strategy.fits() else None
    clone = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    return apply(clone, strategy, learned=learned, **(budget.model_dump(exclude_unset=True) if budget else {}))


def _parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _runners(model: nn.Module, networks: Sequence[SparseModel], modes: Sequence[str], base: Row) -> Iterator[_Runner]:
    """Yield the dense network, twice a mode, and those with strategies."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    compiled = partial(torch.compile, dynamic=False, **({"mode": "reduce-overhead"} if on_gpu else {}))
    for mode in MODES:
        row = replace(base, mode=mode)
        dense: Any = model if mode == "eager" else compiled(model)
        yield _Runner(DENSE, dense, row)
        yield _Runner(AGAIN, dense, row)
        for network in networks if mode in modes else ():
            strategy, budget = network._actor.strategy, network._actor.budget
            name = label(strategy.name, strategy.model_dump(mode="json", exclude_defaults=True))
            sparse_row = replace(
                row, strategy=name, budget=budget.label if strategy.budgeted else "", parameters=_parameters(network)
            )
            call: Any = network if mode == "eager" else compiled(network)
            yield _Runner(sparse_row.label, call, sparse_row, network)


def _times(runners: list[_Runner], rounds: int, device: str, image: tuple[int, int, int]) -> Iterator[Row]:
    """Let the runners take turns, each round beginning with the next, and yield their rows.

    `image` is (channels, height, width).
    """
    visible = [runner for runner in runners if runner.name != AGAIN]
    try:
        pixels = torch.randn(runners[0].row.batch, *image, generator=torch.Generator().manual_seed(0)).to(device)
    except (MemoryError, RuntimeError) as error:
        yield from (replace(runner.row, problem=_problem(error, runner.row.mode)) for runner in visible)
        return
    for runner in runners:
        for _ in range(2):
            _call(runner, pixels)
    for turn in range(rounds):
        start = turn % len(runners)
        for runner in runners[start:] + runners[:start]:
            seconds = _call(runner, pixels)
            if seconds is not None:
                runner.seconds.append(seconds)
    for runner in visible:
        if runner.sparse is not None and runner.row.mode == "eager":
            _time_choices(runner, runner.sparse._actor.strategy, pixels, min(rounds, 5))
    times = {(runner.name, runner.row.mode): runner.seconds for runner in runners if not runner.row.problem}
    yield from (_row(runner, times) for runner in visible)


def _call(runner: _Runner, pixels: Tensor) -> float | None:
    """Call the network once and return the seconds; what it cannot do is its row's problem."""
    if runner.row.problem:
        return None
    kind = PRECISIONS[runner.row.precision]
    try:
        if pixels.is_cuda:
            torch.cuda.reset_peak_memory_stats(pixels.device)
        start = clock(pixels.device)
        with torch.inference_mode(), torch.autocast(pixels.device.type, kind, enabled=kind is not None):
            runner.call(pixels)
        seconds = clock(pixels.device) - start
    except Exception as error:  # a compiler and a strategy have many of their own
        runner.row = replace(runner.row, problem=_problem(error, runner.row.mode))
        return None
    if pixels.is_cuda:
        most = torch.cuda.max_memory_allocated(pixels.device)
        runner.row = replace(runner.row, memory=max(most, runner.row.memory or 0))
    return seconds


def _row(runner: _Runner, times: Mapping[tuple[str, str], list[float]]) -> Row:
    row, sparse, seconds = runner.row, runner.sparse, runner.seconds
    if sparse is not None:
        row = replace(row, macs=sparse.macs, macs_ratio=sparse.macs_ratio, tokens=sparse.tokens[-1])
    if row.problem:
        return row
    latency, ratio = statistics.median(seconds), _ratio(times.get((DENSE, row.mode)), times.get((AGAIN, row.mode)))
    return replace(
        row, latency=latency, latency_p95=float(np.percentile(seconds, 95, method="higher")),
        images_per_s=row.batch / latency, speed_up=_ratio(times.get((DENSE, "eager")), seconds),
        speed_up_compiled=_ratio(times.get((DENSE, "compiled")), seconds),
        spread=None if ratio is None else abs(ratio - 1),
    )  # fmt: skip


def _ratio(over: Sequence[float] | None, under: Sequence[float] | None) -> float | None:
    """Return the median of the ratios, turn by turn; None where one was not measured."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True)) if over and under else None


def _problem(error: BaseException, mode: str) -> str:
    """Return why there are no times, in a line."""
    text = one_line(error)[:200]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return "does not fit the memory"
    return f"cannot be compiled: {text}" if mode == "compiled" else f"failed: {text}"


def _time_choices(runner: _Runner, strategy: Strategy, pixels: Tensor, rounds: int) -> None:
    """Measure what the choice costs, in calls of their own: waiting for the GPU at each choice slows the rest."""
    plan, durations = strategy.plan, list[float]()

    def stopwatch(*args: Any, **kwargs: Any) -> Any:
        start = clock(pixels.device)
        result = plan(*args, **kwargs)
        durations[-1] += clock(pixels.device) - start
        return result

    object.__setattr__(strategy, "plan", stopwatch)
    try:
        for _ in range(rounds):
            durations.append(0.0)
            _call(runner, pixels)
    finally:
        object.__delattr__(strategy, "plan")
    if not runner.row.problem:
        runner.row = replace(runner.row, choice=statistics.median(durations))


def expect_tests(plan: Plan, registry: Registry, device: str) -> tuple[Expected, int]:
    """Return what tests of trained weights are expected to take, and the bytes that a process needs for them.

    A batch of each network without a strategy is timed here, with random weights; a strategy takes its share of the
    MACs. What is to do must be such tests alone. The bytes are the most that this process held until then.
    """
    seconds: dict[str, float] = {}

    def prior(job: Job) -> float:
        cell = job.cell
        if (setting := setting_text(cell)) not in seconds:
            task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
            model = fill(registry.model(cell.model.name), cell.model_params, f"model '{cell.model.name}'")
            pixels = [array.shape for array in task.pictures(cell.n_train, cell.repetition, plan.locations)]
            images, labels = np.zeros((0, *pixels[0][1:]), np.uint8), np.zeros(0, np.int64)
            split = Split(images, labels, labels)
            network = model.build(Data(split, split, task.known_classes(plan.locations) or ()), 0)
            network.module.to(device)
            targets = torch.zeros(TIMED_BATCH, dtype=torch.int64, device=device)
            inputs = torch.zeros(TIMED_BATCH, *pixels[0][1:], dtype=torch.uint8, device=device)
            samples = Samples(inputs, targets, None)
            batch, durations = seconds_per_batch(network, None, samples, first_batch(network, samples), repeats=3)
            seconds[setting] = sum(shape[0] for shape in pixels) * statistics.median(durations) / batch
        return seconds[setting] * (cell.budget.macs or 1.0)

    with one_thread():
        expected = Expected(plan.whole, plan.heads.values(), prior)
    return expected, peak()


def lines(rows: Iterable[Row]) -> str:
    """Return a JSON object a line, with its marks."""
    return "".join(json.dumps({**asdict(row), "share": row.share, "marks": row.marks}) + "\n" for row in rows)


def timm_csv(rows: Iterable[Row]) -> str:
    """Return the rows that have times under the header of timm's tables of inference speed.

    Step times are in milliseconds, parameters in millions; what is not counted, infer_macts, is empty.
    """
    import pandas as pd

    table = [
        {
            "model": f"{row.network}+{row.label}+{row.mode}+{row.precision}", "infer_img_size": row.image,
            "infer_samples_per_sec": round(row.batch / row.latency, 2),
            "infer_step_time": round(1000 * row.latency, 3), "infer_batch_size": row.batch,
            "param_count": round(row.parameters / 1e6, 2), "infer_gmacs": round(row.macs / 1e9, 2), "infer_macts": "",
        }
        for row in rows
        if row.latency is not None
    ]  # fmt: skip
    return pd.DataFrame(table).to_csv(index=False, lineterminator="\n")


def draw(rows: Iterable[Row]) -> bytes:
    """Return a PNG of latency against tokens, and of speed-up over the eager dense network against batch size."""
    with style.sheet():
        figure = style.new(9, 4, layout="constrained")
        left, right = figure.subplots(1, 2)
        left.set(xlabel="patch tokens after the last block", ylabel="ms a batch")
        right.set(xlabel="batch size", ylabel="speed-up over eager dense", xscale="log")
        points: dict[tuple[Axes, str], list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            where = f"{row.network}, {row.mode}, {row.precision}"
            if row.latency is not None:
                points[left, f"batch {row.batch}, {where}"].append((row.tokens, 1000 * row.latency))
            if row.speed_up is not None:
                points[right, f"{row.label}, {where}"].append((row.batch, row.speed_up))
        for (axes, name), line in points.items():
            axes.plot(*zip(*sorted(line), strict=True), label=name, **style.series(len(axes.lines))._asdict())
            axes.legend(fontsize=6)
        return style.content(figure)
