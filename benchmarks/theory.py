"""Time the training of the networks of the theory tasks, over sizes and numbers of trials.

    python benchmarks/theory.py            # about a minute on two cores; prints Markdown tables

All variants are compared within one run, see `timing`. Times are CPU seconds of one thread. The same steps timed twice
(A/A) show the noise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from sparsebench_theory.models import Shallow, TwoLayer
from sparsebench_theory.overfitting.gram import InSpan
from sparsebench_theory.overfitting.network import TwoLayerViT
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.closed_form import ClosedForm
from sparsebench_theory.shallow.network import ShallowViT
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.together import gradients_of, train_together
from timing import Row, Run, ratio, table, turns

from sparsebench.runner.devices import THREADS
from sparsebench.runner.run_cell import deterministic
from sparsebench.tasks.base import Data, Recipe
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples, Steps

Kind = Callable[[ShallowViT, None, Samples, Recipe], Steps]

L, M, B, D = 50, 1000, 20, 10
STILL = 1e-9
"""A learning rate that hardly changes losses, so that all samples stay active and each step does the full work."""


def flops(tokens: int = L, m: int = M) -> float:
    """Return the floating-point operations of a step: 6 L m d + 8 L^2 d per sample, forward and backward."""
    return B * (6 * tokens * m * D + 8 * tokens**2 * D)


def problem(
    tokens: int = L, m: int = M, n: int = B, repetition: int = 0, device: str = "cpu"
) -> tuple[Recipe, ShallowViT, Samples]:
    """Return recipe, network and training samples of one trial."""
    task = Theory(tokens=tokens, d=D, batch=B, test=1)
    data = task.draw(n, repetition, {})
    network = Shallow(m=m).build(data, repetition)
    assert isinstance(network, ShallowViT)
    split = data.train
    inputs, labels, mask = (
        torch.from_numpy(x).to(device) for x in (split.inputs, split.labels, split.relevance_on(None))
    )
    return task.recipe(), network.to(device), Samples(inputs, labels, mask)


def stepper(kind: Kind, tokens: int = L, m: int = M, steps: int = 1) -> Run:
    """Return a function that makes `steps` steps in which all samples are active."""
    recipe, network, samples = problem(tokens, m)
    engine, rows = kind(network, None, samples, replace(recipe, lr=STILL)), np.arange(B)

    def run() -> None:
        for _ in range(steps):
            assert engine.step(rows, 0, 0.0) > 0.9 * B

    return run


def batched(number: int, m: int = M, steps: int = 1) -> Run:
    """Return a function that makes `steps` steps of `number` trials in one program, as on a GPU."""
    problems = [problem(m=m, repetition=repetition) for repetition in range(number)]
    networks, samples = [network for _, network, _ in problems], [split for _, _, split in problems]
    W = [torch.stack([getattr(net, name).detach()[0] for net in networks]) for name in ("W_Q", "W_K", "W_V")]
    W.append(torch.stack([net.W_O.detach() for net in networks]))
    X, a = torch.stack([trial.inputs for trial in samples]), torch.stack([net.a[:1] for net in networks])[:, 0][:, None]
    y = torch.stack([2.0 * trial.labels - 1 for trial in samples])
    weight = torch.full((number, B), 1 / B)

    def run() -> None:
        for _ in range(steps):
            losses, gradients = gradients_of(X, y, weight, a, *W, frozen=False)
            assert losses.min() > 0.9 * B
            for matrix, gradient in zip(W, gradients, strict=True):
                assert gradient is not None
                matrix.sub_(gradient, alpha=STILL)

    return run


def speed(rounds: int) -> str:
    """Compare the implementations of a step with each other and with the fastest matrix product."""
    left, right = (torch.rand(1024, 1024) for _ in range(2))
    rows: list[Row] = []
    for m in (M, 256):
        steps = 20 * M // m
        seconds = turns(
            {
                "autograd": stepper(Autograd, m=m, steps=steps),
                "closed form": stepper(ClosedForm, m=m, steps=steps),
                "closed form again": stepper(ClosedForm, m=m, steps=steps),
                "closed form in torch": batched(1, m=m, steps=steps),
                "closed form in torch, 8 trials": batched(8, m=m, steps=steps),
                "sgemm": lambda: left @ right,
            },
            rounds,
        )
        work = {name: steps * flops(m=m) for name in seconds} | {"sgemm": 2 * 1024.0**3}
        work["closed form in torch, 8 trials"] *= 8
        rate = {name: [work[name] / s / 1e9 for s in each] for name, each in seconds.items()}
        for name, each in rate.items():
            gain, share = ratio(each, rate["autograd"]), ratio(each, rate["sgemm"])
            rows.append((name, m, f"{statistics.median(each):.1f}", f"{gain:.2f}", f"{share:.2f}"))
    return table(["steps by", "m", "GFLOP per second", "over autograd", "share of sgemm"], rows)


def on_cuda(m: int, number: int = 64, steps: int = 200) -> str:
    """Return the GFLOP per wall second of `number` trials in one program."""

    def run() -> None:
        trials = []
        for repetition in range(number):
            recipe, network, samples = problem(m=m, repetition=repetition, device="cuda")
            recipe = replace(recipe, lr=STILL, steps=steps)
            trials.append(Training(network, None, samples, recipe, ("order", repetition)))
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_together(trials)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    seconds: list[float] = []
    for _ in range(4):
        run()
    return f"{number * steps * flops(m=m) / statistics.median(seconds[1:]) / 1e9:.1f}"


def trial(n: int, repetition: int = 0, *, stop: bool = True) -> int:
    """Run a whole trial, including data and network, and return its number of steps."""
    recipe, network, samples = problem(n=n, repetition=repetition)
    recipe = replace(recipe, stop_at_zero_loss=stop)
    steps = ClosedForm(network, None, samples, recipe)
    done = Training(network, None, samples, recipe, ("order", repetition), steps=steps).run()
    return int(done["steps"])


def throughput(seconds: float) -> tuple[float, float]:
    """Repeat one trial for about `seconds`; return trials per wall second and per CPU second."""
    with deterministic():
        trial(B)
        start, used, number = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < start + seconds:
            trial(B)
            number += 1
        return number / (time.perf_counter() - start), number / (time.process_time() - used)


def processes(rounds: int, seconds: float) -> str:
    """Compare one process with two, each with its own trials."""
    os.environ.update(THREADS)
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(throughput, [0.5, 0.5]))
        for _ in range(rounds):
            for number, each in found.items():
                wall, cpu = np.transpose(list(pool.map(throughput, [seconds] * number)))
                each.append((wall.sum(), cpu.mean()))
    rows = []
    for number, each in found.items():
        wall, cpu = np.median(each, axis=0)
        gain = ratio((wall for wall, _ in each), (wall for wall, _ in found[1]))
        rows.append((number, f"{wall:.2f}", f"{gain:.2f}", f"{cpu:.2f}"))
    return table(["processes", "trials a second", "over one", "trials a CPU-second"], rows)


def step_cost(rounds: int) -> str:
    """Time a step over numbers of tokens and neurons."""
    shapes = [*((tokens, M) for tokens in (25, 50, 100, 200)), *((L, m) for m in (64, 256, 4000))]
    steps = {shape: max(2, int(1e9 / flops(*shape))) for shape in shapes}
    runs = {f"{shape}": stepper(ClosedForm, *shape, steps=steps[shape]) for shape in shapes}
    rows: list[Row] = []
    for shape, seconds in zip(shapes, turns(runs, rounds).values(), strict=True):
        each = statistics.median(seconds) / steps[shape]
        rows.append((f"L={shape[0]}, m={shape[1]}", f"{1e3 * each:.3f}", f"{flops(*shape) / each / 1e9:.1f}"))
    return table(["step of", "ms", "GFLOP per second"], rows)


def trial_cost(rounds: int) -> str:
    """Time whole trials over numbers of samples and of trials."""
    found: dict[str, int] = {}

    def whole(name: str, n: int, number: int) -> Run:
        def run() -> None:
            found[name] = sum(trial(n, repetition) for repetition in range(number))

        return run

    wanted = [(f"N={n}, to zero hinge", n, 1) for n in (20, 80, 320)]
    wanted += [(f"{number} trials of N=20", 20, number) for number in (2, 4, 8)]
    seconds = turns({name: whole(name, n, number) for name, n, number in wanted}, rounds)
    rows: list[Row] = []
    for name, each in seconds.items():
        median = statistics.median(each)
        rows.append((name, found[name], f"{median:.3f}", f"{1e3 * median / found[name]:.3f}"))
    return table(["training", "steps", "seconds", "ms a step"], rows)


def early_stop(rounds: int) -> str:
    """Compare trials that stop at zero loss with the same trials without early stopping."""
    rows: list[Row] = []
    for n in (20, 80, 320):
        found = turns({"stops": partial(trial, n), "goes on": partial(trial, n, stop=False)}, rounds)
        stops, goes_on = (statistics.median(each) for each in found.values())
        rows.append((f"N={n}", f"{stops:.3f}", f"{goes_on:.3f}", f"{ratio(found['goes on'], found['stops']):.2f}"))
    return table(["trial", "seconds", "all 600 steps", "over stopping"], rows)


@cache
def overfitting(n: int) -> tuple[Overfitting, Data]:
    """Return the overfitting task and its data of n training samples."""
    return Overfitting(), Overfitting().draw(n, 0, {})


def fitted(kind: Callable[[TwoLayerViT, None, Samples, Recipe], Steps], n: int) -> int:
    """Train a new two-layer model until it fits n samples, and return the number of steps."""
    task, data = overfitting(n)
    network, split = TwoLayer().build(data, 0), data.train
    assert isinstance(network, TwoLayerViT) and split.relevance is not None
    samples = Samples(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)))
    steps = kind(network, None, samples, task.recipe())
    done = Training(network, None, samples, task.recipe(), ("order",), steps=steps).run()
    return int(done["steps"])


def span(rounds: int) -> str:
    """Compare whole trainings of the two-layer model in the span of its tokens with those by autograd."""
    rows: list[Row] = []
    for n in (4, 12, 20):
        found = turns({"autograd": partial(fitted, Autograd, n), "in the span": partial(fitted, InSpan, n)}, rounds)
        slow, fast = (statistics.median(each) for each in found.values())
        gain = ratio(found["autograd"], found["in the span"])
        rows.append((f"N={n}, {fitted(InSpan, n)} steps", f"{slow:.3f}", f"{fast:.3f}", f"{gain:.2f}"))
    return table(["training", "autograd, s", "in the span, s", "over autograd"], rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    rounds = args.rounds
    with deterministic():
        if args.device == "cuda":
            rows = [("many trials on CUDA", m, on_cuda(m)) for m in (M, 256)]
            print(table(["steps by", "m", "GFLOP per second"], rows))
            return
        print(speed(rounds), step_cost(rounds), trial_cost(3), early_stop(3), span(rounds), sep="\n\n")
        print("", processes(5, 2.0), sep="\n")


if __name__ == "__main__":
    main()
