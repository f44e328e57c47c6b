"""Compare the speed-up of strategies with their reduction of MACs, and their own matrix products with counted MACs.

    python benchmarks/strategies.py            # about 15 minutes of one core; prints the tables of RESULTS.md

The network is DeiT-S with random weights, without gradients. All variants are compared within one run, see `timing`.
Times are CPU seconds of one thread, or seconds of the GPU with --device cuda.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from images import SHARES, network, samples, shares, test_pass
from timing import AGAIN, Run, ratio, settled, table

from sparsebench.models import attention
from sparsebench.models.actor import Actor
from sparsebench.models.attention import qkv
from sparsebench.models.deep import DeepViT
from sparsebench.runner.run_cell import deterministic
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import fill, parse

MODEL, TARGETS = "DeiT-S", (0.87, 0.65, 0.5, 0.37)
BATCH = {"cpu": 8, "cuda": 256}
TOP_K = (
    "random", "random_inside", "radial", "attn_topk", "attn_topk:attention=mean_query", "attn_topk:attention=received",
    "evit", "attn_value_norm", "value_norm", "feature_norm", "rep_shift", "column_norm", "noise", "patch_variance",
    "gradient_energy",
)  # fmt: skip
MERGING = ("tome", "tofu", "pitome", "mctf", "atc")
OTHERS = ("diffrate", "tps", "attn_topk:disposal=merge", "zero_tprune", "dpc_knn", "k_medoids", "downsample")


def strategy(name: str) -> Strategy:
    """Return a shipped strategy from NAME[:param=value]."""
    spec = parse(name)
    (cls,) = import_module(f"sparsebench_plugins.{spec.name}").sparsebench_strategies()
    (given,) = spec.combinations()
    return fill(cls, given, name)


def actors(net: DeepViT, name: str) -> dict[str, Actor]:
    """Return the strategy at each budget in TARGETS."""
    return {f"macs {target}": Actor(strategy(name), Budget(macs=target), net.cost, net.grid, 0) for target in TARGETS}


def speed_up(names: tuple[str, ...], kind: str, device: str, rounds: int) -> str:
    """Compare the speed-up of forward passes with each strategy with the ratio of MACs."""
    net, rows, notes = network(MODEL, device), [], []
    data = samples(net, BATCH[device])
    dense = test_pass(net, None, data)
    for name in names:
        acting = actors(net, name)
        runs = {target: test_pass(net, actor, data) for target, actor in acting.items()}
        seconds, note = settled({"dense": dense, "dense" + AGAIN: dense, **runs}, rounds, device)
        rows += shares(name, net, acting, seconds)
        notes.append(f"{name}: {note}")
    headers = (f"{kind}, {MODEL}, {BATCH[device]} images{on(device)}", *SHARES[1:])
    return table(headers, rows, " ".join(notes))


def on(device: str) -> str:
    """Return the device for the heading of a table."""
    return "" if device == "cpu" else f", {torch.cuda.get_device_name(device)}"


def scoring(device: str, rounds: int, times: int = 50) -> str:
    """Compare attention that is computed only for scores with the fused attention of the same layer."""
    net, rows, notes = network(MODEL, device), [], []
    attn, B = net.module.blocks[3].attn, BATCH[device]
    for T in (197, 138, 99, 50):
        with torch.inference_mode():
            q, k, v = qkv(attn, torch.randn(B, T, 384, device=device, generator=torch.Generator(device).manual_seed(0)))
        fields = attention.fields_of(attn, q, k, v, net.prefix, net.class_rows)
        fused = repeated(partial(F.scaled_dot_product_attention, q, k, v), times)
        runs = {"fused": fused, "fused" + AGAIN: fused}
        for field in ("class_attention", "mean_query_attention", "received_attention"):
            runs[field] = repeated(fields[field], times)
        seconds, note = settled(runs, rounds, device)
        shares_ = (f"{ratio(seconds[name], seconds['fused']):.3f}" for name in [*runs][2:])
        rows.append((f"{B} images, {T} tokens", *shares_))
        notes.append(f"{T} tokens: {note}")
    headers = (f"over fused attention{on(device)}", "class row", "row of the mean query", "received, whole maps")
    return table(headers, rows, " ".join(notes))


def repeated(call: Callable[[], object], times: int) -> Run:
    """Return a function that repeats a call `times` times, without gradients."""

    @torch.inference_mode()
    def run() -> None:
        for _ in range(times):
            call()

    return run


class Call(NamedTuple):
    """One decision: N tokens before and M after, width C, H heads of width d, and P prefix tokens."""

    N: int
    M: int
    C: int
    d: int
    H: int
    P: int
    block: int
    depth: int

    def rank(self) -> int:
        """Return the MACs of Zero-TPrune's I-stage: a vector times the (T, T) maps of each head, repeated."""
        quarter = (self.block >= self.depth / 4) + (self.block >= 3 * self.depth / 4)
        return (30, 5, 1)[quarter] * self.H * (self.N + self.P) ** 2


OWN: dict[str, Callable[[Call], int]] = {
    "tome": lambda c: c.N // 2 * -(-c.N // 2) * c.d,
    "tofu": lambda c: c.N // 2 * -(-c.N // 2) * c.d,
    "pitome": lambda c: c.N**2 * c.d,
    "atc": lambda c: c.N**2 * c.d,
    "mctf": lambda c: c.N // 2 * -(-c.N // 2) * c.C,
    "diffrate": lambda c: round(0.5 * (c.N - c.M)) * c.M * c.C,
    "attn_topk:disposal=merge": lambda c: c.N * c.M * c.C,
    "tps": lambda c: 2 * c.N * c.M * c.C,
    "downsample": lambda c: c.N * c.M * c.C,
    "evit": lambda c: c.N * c.C,
    "zero_tprune": lambda c: c.rank() + c.N // 2 * -(-c.N // 2) * c.C,
    "dpc_knn": lambda c: c.N**2 * c.C,
    "k_medoids": lambda c: c.N**2 * c.C + 5 * c.N**2,
}
"""MACs of the strategy's own products, including those of its plan (tps, downsample, evit)."""


def calls(net: DeepViT, actor: Actor) -> Iterator[Call]:
    """Yield the decisions of a forward pass."""
    attn, N = net.module.blocks[0].attn, net.cost.tokens
    for block, M in actor.keep.items():
        if M < N:
            C, d, H = attn.num_heads * attn.head_dim, attn.head_dim, attn.num_heads
            yield Call(N, M, C, d, H, net.prefix, block, net.cost.depth)
            N = M


def own_products() -> str:
    """Compare the strategies' own products with the counted MACs."""
    net, rows = network(MODEL, "cpu"), []
    dense = net.cost.macs(net.cost.dense())
    for name, formula in OWN.items():
        own = (sum(map(formula, calls(net, actor))) / dense for actor in actors(net, name).values())
        rows.append((name, *(f"{share:.2%}" for share in own)))
    return table(("own products over dense MACs", *(f"macs {target}" for target in TARGETS)), rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names of tables: top_k, merging, ...; all unless given")
    parser.add_argument("--device", choices=tuple(BATCH), default="cpu")
    args = parser.parse_args()
    timed: dict[str, Callable[[str, int], str]] = {
        "top_k": partial(speed_up, TOP_K, "top-k"),
        "merging": partial(speed_up, MERGING, "merging"),
        "others": partial(speed_up, OTHERS, "others"),
        "scoring": scoring,
    }
    with deterministic():
        for name, one in timed.items():
            if not args.only or name in args.only:
                print(one(args.device, args.rounds), end="\n\n", flush=True)
        if not args.only or "own_products" in args.only:
            print(own_products(), end="\n\n")


if __name__ == "__main__":
    main()
