"""Times of networks that take turns, so that what slows the machine slows all of them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.sparse_model import SparseModel
from sparsebench.deploy.words import understand
from sparsebench.errors import UserError, one_line
from sparsebench.speed.rows import Row, percentile, ratio

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("eager", "compiled")
DENSE, AGAIN = "dense", "dense again"


@dataclass
class _Runner:
    """A network in one mode: what is called, its row so far and its times."""

    name: str
    call: Callable[[Tensor], Any]
    row: Row
    sparse: SparseModel | None = None
    seconds: list[float] = field(default_factory=list)
    choices: list[float] = field(default_factory=list)


def measure(
    model: nn.Module, name: str, strategies: Sequence[str], *, batches: Sequence[int] = (1, 8, 32),
    modes: Sequence[str] = MODES, precisions: Sequence[str] = ("float32",), rounds: int = 20, device: str = "cpu",
) -> Iterator[Row]:  # fmt: skip
    """Yield a row for each network, mode, precision and batch size.

    The compiled dense network is always among them. What does not fit the memory, or cannot be compiled, has a row
    that says so.

    Raises:
        UserError: a strategy or a value that is not known.
    """
    _check(batches, modes, precisions, rounds)
    model = model.eval().to(device)
    networks = [_sparse(model, words).eval() for words in strategies]
    scale = apply(copy.deepcopy(model), "dense")
    pixels = scale._network.pixels
    parameters = sum(weight.numel() for weight in model.parameters())
    cost = scale._actor.cost
    macs = cost.macs(cost.dense())
    for precision in precisions:
        for batch in batches:
            torch.compiler.reset()
            base = Row(name, DENSE, "eager", precision, batch, pixels[1], parameters, macs, 1.0, cost.tokens)
            runners = list(_runners(model, networks, modes, base))
            yield from _times(runners, rounds, device, pixels)


def _sparse(model: nn.Module, words: str) -> SparseModel:
    """Return a copy of the network with a strategy; what that learns is random, and the tokens that stay count."""
    strategy = understand(words, {}).strategy
    return apply(copy.deepcopy(model), words, learned=RANDOM if strategy.trained or strategy.fits() else None)


def _check(batches: Sequence[int], modes: Sequence[str], precisions: Sequence[str], rounds: int) -> None:
    if not batches or min(batches) < 1 or rounds < 2:
        raise UserError("batch sizes and rounds", got=f"{list(batches)}, {rounds}", allowed="1 or more; 2 or more")
    for got, allowed in ((modes, MODES), (precisions, tuple(PRECISIONS))):
        if strange := [each for each in got if each not in allowed]:
            raise UserError("a mode or precision", got=strange[0], allowed=allowed)


def _runners(model: nn.Module, networks: Sequence[SparseModel], modes: Sequence[str], base: Row) -> Iterator[_Runner]:
    """Yield the dense network, twice a mode, and those with strategies."""
    for mode in MODES:
        row = replace(base, mode=mode)
        dense = model if mode == "eager" else torch.compile(model, dynamic=False)
        yield _Runner(DENSE, dense, row)
        yield _Runner(AGAIN, dense, row)
        for network in networks if mode in modes else ():
            call = network if mode == "eager" else torch.compile(network, dynamic=False)
            yield _Runner(network.spec, call, replace(row, strategy=network.spec), network)


def _times(runners: list[_Runner], rounds: int, device: str, image: tuple[int, int, int]) -> Iterator[Row]:
    """Let the runners take turns, each round beginning with the next, and yield their rows.

    `image` is (channels, height, width).
    """
    try:
        pixels = torch.randn(runners[0].row.batch, *image, generator=torch.Generator().manual_seed(0))
        pixels = pixels.to(device)
    except (MemoryError, RuntimeError) as error:
        yield from (replace(each.row, problem=_problem(error, each.row.mode)) for each in runners if each.name != AGAIN)
        return
    for each in runners:
        for _ in range(2):
            _once(each, pixels, device)
    for turn in range(rounds):
        start = turn % len(runners)
        for each in runners[start:] + runners[:start]:
            if not each.row.problem:
                _once(each, pixels, device, counted=True)
    _choices(runners, pixels, min(rounds, 5), device)
    times = {(each.name, each.row.mode): each.seconds for each in runners if not each.row.problem}
    for each in runners:
        if each.name != AGAIN:
            yield _row(each, times)


def _row(runner: _Runner, times: dict[tuple[str, str], list[float]]) -> Row:
    if runner.row.problem:
        return runner.row
    mode, seconds = runner.row.mode, runner.seconds
    eager, compiled = times.get((DENSE, "eager")), times.get((DENSE, "compiled"))
    dense, again = times.get((DENSE, mode)), times.get((AGAIN, mode))
    row = runner.row
    if runner.sparse is not None:
        macs = runner.sparse.macs
        row = replace(row, macs=macs, macs_ratio=row.macs / macs, tokens=runner.sparse.tokens[-1])
    return replace(
        row, p50=statistics.median(seconds), p95=percentile(seconds, 0.95),
        choice=statistics.median(runner.choices) if runner.choices else None,
        speedup=ratio(eager, seconds) if eager else None,
        speedup_compiled=ratio(compiled, seconds) if compiled else None,
        spread=abs(ratio(dense, again) - 1) if dense and again else None,
    )  # fmt: skip


def _once(runner: _Runner, pixels: Tensor, device: str, counted: bool = False) -> None:
    """Call the network once; what it cannot do is its row's problem."""
    if runner.row.problem:
        return
    kind, cuda = PRECISIONS[runner.row.precision], pixels.is_cuda
    try:
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        with torch.inference_mode(), torch.autocast(pixels.device.type, kind, enabled=kind is not None):
            runner.call(pixels)
        if cuda:
            torch.cuda.synchronize(device)
    except Exception as error:  # a compiler and a strategy have many of their own
        runner.row = replace(runner.row, problem=_problem(error, runner.row.mode))
        return
    if counted:
        runner.seconds.append(time.perf_counter() - start)
        if cuda:
            most = torch.cuda.max_memory_allocated(device)
            runner.row = replace(runner.row, memory=max(most, runner.row.memory or 0))


def _problem(error: BaseException, mode: str) -> str:
    """Return why there are no times, in a line."""
    text = one_line(error)[:200]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return "does not fit the memory"
    return f"cannot be compiled: {text}" if mode == "compiled" else f"failed: {text}"


def _choices(runners: Sequence[_Runner], pixels: Tensor, rounds: int, device: str) -> None:
    """Measure what the choice costs, in calls of their own: waiting for the GPU at each choice slows the rest."""
    for each in runners:
        if each.sparse is None or each.row.mode != "eager":
            continue
        for _ in range(rounds):
            spent: list[float] = []
            with _choice_clock(each.sparse, spent, pixels.is_cuda):
                _once(each, pixels, device)
            if not each.row.problem:
                each.choices.append(sum(spent))


@contextmanager
def _choice_clock(sparse: SparseModel, spent: list[float], cuda: bool) -> Iterator[None]:
    """Add the seconds of each `plan` of the strategy to a list."""
    strategy = sparse._actor.strategy
    plan = strategy.plan

    def plan_on_clock(*args: Any, **kwargs: Any) -> Any:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = plan(*args, **kwargs)
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
        return result

    object.__setattr__(strategy, "plan", plan_on_clock)
    try:
        yield
    finally:
        object.__delattr__(strategy, "plan")
