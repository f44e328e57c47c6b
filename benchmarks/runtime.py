"""How fast sparsified networks really are, and what the harness costs.

    python benchmarks/runtime.py            # about 2 minutes on one core; prints the tables of RESULTS.md

Everything is compared inside one run: variants take turns, and a ratio is the median of the ratios turn by turn. The
same model timed twice (A/A) shows the noise; a table whose A/A is off by over 3 % should be measured again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.random import Random
from tabulate import tabulate

from sparsebench.budget import Budget
from sparsebench.models.acting import Actor
from sparsebench.models.deep import DeepViT, small_vit
from sparsebench.sweep.worker import one_thread
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Samples, losses, optimiser

Run = Callable[[], object]


def turns(variants: dict[str, Run], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, the variants taking turns, after one round not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, run in variants.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def network(device: str, dim: int = 192, depth: int = 5) -> DeepViT:
    """Return the small ViT of 64 + 1 tokens."""
    torch.manual_seed(0)
    vit = small_vit(32, 10, patch=4, dim=dim, depth=depth, heads=4)
    return DeepViT(vit.to(device))


def samples(n: int, device: str) -> Samples:
    """Return n random images with labels and an empty mask."""
    torch.manual_seed(1)
    images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, device=device)
    return Samples(images, torch.arange(n, device=device) % 10, torch.zeros(n, 64, device=device))


def speed_up(device: str, rounds: int) -> str:
    """Compare pruned forward passes with the dense one, beside the ratio of MACs."""
    net, data = network(device), samples(128, device)
    net.module.eval()
    actors: dict[str, Actor | None] = {"dense": None, "dense again": None}
    for rate in (0.9, 0.7, 0.5):
        budget = Budget(keep_rate=rate, blocks=(1, 3))
        actors[f"attn_topk keep {rate}"] = Actor(AttnTopK(), budget, net.cost, net.grid, 0)
        actors[f"random at the input keep {rate}"] = Actor(Random(), Budget(keep_rate=rate), net.cost, net.grid, 0)

    def forward(actor: Actor | None) -> Run:
        return lambda: data.forward(net, actor, data.items, visit=0, training=False)

    with torch.inference_mode():
        seconds = turns({name: forward(actor) for name, actor in actors.items()}, rounds, device)
    dense = net.cost.macs(net.cost.steps("input", (), (64,), ()))
    rows = []
    for name, actor in actors.items():
        macs = 1.0 if actor is None else dense / net.cost.macs(actor.planned)
        gain = ratio(seconds["dense"], seconds[name])
        rows.append((name, f"{gain:.3f}", f"{macs:.3f}", f"{gain / macs:.3f}"))
    return tabulate(rows, headers=["variant", "speed-up", "dense MACs / MACs", "share reached"], tablefmt="pipe")


def overhead(device: str, rounds: int) -> str:
    """Compare the harness's training step with the same step written by hand."""
    net, data = network(device), samples(64, device)
    recipe = Recipe("cross-entropy", "adamw", 0.0, 64, epochs=1, steps=1)
    opt = optimiser(recipe, list(net.module.parameters()))
    everything = Actor(Random(), Budget(macs=1.0), net.cost, net.grid, 0)
    images = (data.inputs / 255 - 0.5) / 0.5

    def bare() -> None:
        loss = torch.nn.functional.cross_entropy(net.module(images), data.labels)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    def harness(actor: Actor | None) -> Run:
        def step() -> None:
            outputs, _ = data.forward(net, actor, data.items, visit=0, training=True)
            loss = losses(recipe, outputs, data.labels).mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()

        return step

    seconds = turns(
        {"bare": bare, "bare again": bare, "dense": harness(None), "keep all": harness(everything)}, rounds, device
    )
    rows = [(name, f"{ratio(s, seconds['bare']):.3f}") for name, s in seconds.items()]
    return tabulate(rows, headers=["training step", "time / bare"], tablefmt="pipe")


def start_up(rounds: int) -> str:
    """Time the commands that must answer at once."""
    rows = []
    for words in (["--help"], ["list"], ["list", "suites", "--json"]):
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "sparsebench", *words], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        rows.append((f"sparsebench {' '.join(words)}", f"{statistics.median(times[1:]):.2f}"))
    return tabulate(rows, headers=["command", "seconds"], tablefmt="pipe")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with one_thread():
        print(speed_up(args.device, args.rounds), overhead(args.device, args.rounds), start_up(5), sep="\n\n")


if __name__ == "__main__":
    main()
