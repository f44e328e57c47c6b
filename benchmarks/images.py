"""Time image tasks: sparsified Vision Transformers, the training loop, and the generation of images.

    python benchmarks/images.py            # about 8 minutes of one core; prints the tables of RESULTS.md

All variants are compared within one run, see `timing`. Times are CPU seconds of one thread. With --device cuda only
networks are measured, in seconds of the GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pipelines import PilAugmented, PilComposite, augmented, composed, loaded, made
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from timing import AGAIN, Run, Seconds, ratio, settled, table

from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT, small_vit
from sparsebench.models.timm_models import create_vit
from sparsebench.models.vits import Vit
from sparsebench.runner.run_cell import deterministic
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.base import Recipe
from sparsebench.tasks.images import Composite
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples

RATES = (0.9, 0.7, 0.5)
KEPT = 42
"""Number of 64 patches under a foreground of 26 x 26 on 32 x 32 pixels, by area."""
RECIPE = Recipe("cross-entropy", "adamw", 1e-4, 128, epochs=1, steps=10**9, weight_decay=0.05)
NAMED = {"DeiT-S": "deit_small_patch16_224", "ViT-B": "vit_base_patch16_224"}
SMALL = "small ViT"
SIZES = {"cpu": {"DeiT-S": 8, "ViT-B": 4, SMALL: 128}, "cuda": {"DeiT-S": 256, "ViT-B": 256, SMALL: 1024}}
"""Batch size for each model."""


def network(name: str, device: str, precision: str = "float32") -> DeepViT:
    """Return DeiT-S, ViT-B or the small ViT (32 pixels, patch 4, 5 blocks, width 192, 4 heads) with random weights."""
    torch.manual_seed(0)
    vit = create_vit(NAMED[name], 224, 1000) if name in NAMED else small_vit(32, 10, patch=4, dim=192, depth=5, heads=4)
    return DeepViT(vit.to(device), precision=precision)


def samples(net: DeepViT, n: int) -> Samples:
    """Return n random images for a network, with labels and a mask of the share `KEPT` / 64 of the patches."""
    torch.manual_seed(1)
    N, device = net.cost.tokens, next(net.module.parameters()).device
    images = torch.randint(0, 256, (n, 3, *net.module.patch_embed.img_size), dtype=torch.uint8)
    mask = (torch.rand(n, N).argsort(dim=1) < KEPT * N // 64).float()
    return Samples(images.to(device), torch.arange(n, device=device) % 10, mask.to(device))


def topk(net: DeepViT, rate: float) -> Actor:
    """Return attention top-k in three blocks of a large network, or in blocks 2 and 4 of the small one."""
    blocks = (1, 3) if net.cost.depth == 5 else (3, 6, 9)
    return Actor(AttnTopK(), Budget(keep_rate=rate, blocks=blocks), net.cost, net.grid, 0)


def oracle(net: DeepViT) -> Actor:
    """Return the oracle at the input."""
    return Actor(Oracle(), Budget(keep_rate=KEPT / 64), net.cost, net.grid, 0)


def macs(net: DeepViT, actor: Actor) -> float:
    """Return the MACs of the dense model divided by those of the pruned model."""
    return net.cost.macs(net.cost.dense()) / net.cost.macs(actor.planned)


def test_pass(net: DeepViT, actor: Actor | None, data: Samples, times: int = 1) -> Run:
    """Return a function that tests the network on all samples, `times` times."""

    @torch.inference_mode()
    def run() -> None:
        net.module.eval()
        for _ in range(times):
            data.forward(net, actor, data.items, visit=0, training=False)

    return run


def step(net: DeepViT, actor: Actor | None, data: Samples) -> Run:
    """Return a function that runs one training step of sparsebench with all samples."""
    steps, rows = Autograd(net, actor, data, RECIPE), data.items.cpu().numpy()

    def run() -> None:
        net.module.train()
        steps.step(rows, 0, 0.0)

    return run


def shares(title: str, net: DeepViT, actors: dict[str, Actor], seconds: Seconds) -> list[tuple[str, ...]]:
    """Return the rows of a table of speed-ups and ratios of MACs."""
    rows = []
    for name, actor in actors.items():
        gain, most = ratio(seconds["dense"], seconds[name]), macs(net, actor)
        rows.append((f"{title}, {name}", f"{gain:.3f}", f"{most:.3f}", f"{gain / most:.3f}"))
    return rows


SHARES = ("model, batch, tokens", "speed-up", "dense MACs / MACs", "share reached")


def speed_up(device: str, rounds: int) -> str:
    """Compare the speed-up of pruned test passes with the ratio of MACs."""
    rows, notes = [], []
    sizes = SIZES[device]
    for name, batch in [*sizes.items(), ("DeiT-S", 1), (SMALL, 256), (SMALL, 64), (SMALL, 8), (SMALL, 1)]:
        net = network(name, device)
        data, times = samples(net, batch), max(1, sizes[name] // batch // 2)
        actors = {f"keep {rate}": topk(net, rate) for rate in RATES}
        runs = {kind: test_pass(net, actor, data, times) for kind, actor in actors.items()}
        dense = test_pass(net, None, data, times)
        seconds, note = settled({"dense": dense, "dense" + AGAIN: dense, **runs}, rounds, device)
        rows += shares(f"{name}, {batch}", net, actors, seconds)
        notes.append(f"{name}, {batch}: {note}")
    return table(SHARES, rows, " ".join(notes))


def training_step(device: str, rounds: int) -> str:
    """Compare the speed-up of pruned training steps of the small ViT with the ratio of MACs."""
    net = network(SMALL, device)
    data = samples(net, SIZES[device][SMALL])
    actors = {f"oracle at the input, {KEPT} / 64": oracle(net), **{f"keep {rate}": topk(net, rate) for rate in RATES}}
    runs = {name: step(net, actor, data) for name, actor in actors.items()}
    dense = step(net, None, data)
    seconds, note = settled({"dense": dense, "dense" + AGAIN: dense, **runs}, rounds, device)
    rows = shares(f"{SMALL}, {SIZES[device][SMALL]}", net, actors, seconds)
    return table(("training step, " + SHARES[0], *SHARES[1:]), rows, note)


def bare(net: DeepViT, data: Samples) -> Run:
    """Return a handwritten training step of the timm model."""
    vit = net.module
    parameters = list(vit.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=RECIPE.lr, weight_decay=RECIPE.weight_decay)

    def run() -> None:
        vit.train()
        images = (data.inputs[data.items].float() / 255 - 0.5) / 0.5
        loss = torch.nn.functional.cross_entropy(vit(images), data.labels[data.items])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    return run


def overhead(device: str, rounds: int) -> str:
    """Compare the training step of sparsebench with the same handwritten step."""
    net = network(SMALL, device)
    data = samples(net, SIZES[device][SMALL])
    everything = Actor(AttnTopK(), Budget(macs=1.0), net.cost, net.grid, 0)
    by_hand = bare(net, data)
    runs = {
        "by hand": by_hand, "by hand" + AGAIN: by_hand, "harness, dense": step(net, None, data),
        "harness, a strategy that keeps all": step(net, everything, data),
    }  # fmt: skip
    seconds, note = settled(runs, 2 * rounds, device)
    rows = [(name, f"{ratio(each, seconds['by hand']):.3f}") for name, each in seconds.items()]
    return table((f"training step, {SMALL}, {SIZES[device][SMALL]}", "time / by hand"), rows, note)


def halved(device: str, rounds: int) -> str:
    """Compare bfloat16 with float32 for dense and pruned networks, in test passes and training steps."""
    rows, notes = [], []
    kinds: list[tuple[str, str, Callable[..., Run]]] = [
        ("test pass", "DeiT-S", test_pass), ("test pass", "ViT-B", test_pass), ("test pass", SMALL, test_pass),
        ("training step", SMALL, step),
    ]  # fmt: skip
    for what, name, make in kinds:
        runs: dict[str, Run] = {}
        for precision in ("float32", "bfloat16"):
            net = network(name, device, precision)
            data = samples(net, SIZES[device][name])
            actors: dict[str, Actor | None] = {"dense": None, **{f"keep {rate}": topk(net, rate) for rate in RATES[1:]}}
            actors[f"oracle at the input, {KEPT} / 64"] = oracle(net)
            runs |= {f"{kind} {precision}": make(net, actor, data) for kind, actor in actors.items()}
        runs["dense float32" + AGAIN] = runs["dense float32"]
        seconds, note = settled(runs, rounds, device)
        for kind in actors:
            gain = ratio(seconds[f"{kind} float32"], seconds[f"{kind} bfloat16"])
            both = ratio(seconds["dense float32"], seconds[f"{kind} bfloat16"])
            rows.append((f"{what}, {name}, {kind}", f"{gain:.3f}", f"{both:.3f}"))
        notes.append(f"{what}, {name}: {note}")
    return table(("bfloat16", "over the same in float32", "over dense in float32"), rows, " ".join(notes))


def attention(device: str, rounds: int) -> str:
    """Compare dense test passes with and without torch's fused attention, in both precisions."""
    rows, notes = [], []
    for name in ("DeiT-S", SMALL):
        net = network(name, device)
        parts = [part for part in net.module.modules() if hasattr(part, "fused_attn")]
        normed = net.normalise(samples(net, SIZES[device][name]).inputs)

        @torch.inference_mode()
        def run(fused: bool, bf16: bool, net: DeepViT = net, parts: list[Any] = parts, x: Any = normed) -> None:
            for part in parts:
                part.fused_attn = fused
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                net.module.eval()(x)

        runs: dict[str, Run] = {
            f"{precision}, {kernel}": partial(run, kernel == "fused", precision == "bfloat16")
            for precision in ("float32", "bfloat16")
            for kernel in ("fused", "plain")
        }
        runs["float32, fused" + AGAIN] = runs["float32, fused"]
        seconds, note = settled(runs, rounds, device)
        plain = {kind: seconds[f"{kind.partition(',')[0]}, plain"] for kind in runs}
        rows += [(f"{name}, {kind}", f"{ratio(seconds['float32, fused'], each):.3f}",
                  f"{ratio(plain[kind], each):.3f}") for kind, each in seconds.items()]  # fmt: skip
        notes.append(f"{name}: {note}")
    return table(("dense test pass, attention", "over float32, fused", "over plain"), rows, " ".join(notes))


def composites(n: int, rounds: int) -> str:
    """Compare the generation of n composite images and their relevant patches with PIL, picture by picture."""
    with made(n) as of:
        by_pil, ours = partial(loaded, PilComposite(of)), partial(composed, of)
        return beside_pil("composite images by", n, by_pil, ours, rounds)


def augmentation(n: int, rounds: int) -> str:
    """Compare shifting, flipping and normalising n images in memory with torchvision on PIL images."""
    images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8)
    by_pil = partial(loaded, PilAugmented(images.permute(0, 2, 3, 1).contiguous().numpy()))
    ours = partial(augmented, images, network(SMALL, "cpu"))
    return beside_pil("augmented images by", n, by_pil, ours, rounds)


def beside_pil(what: str, n: int, by_pil: Run, ours: Run, rounds: int) -> str:
    """Return a table of the images per second of both ways.

    The first variant after PIL needs new memory from the system, which may be slow on a virtual machine.
    """
    runs: dict[str, Run] = {"PIL": by_pil, "PIL" + AGAIN: by_pil, "sparsebench, first after PIL": ours}
    runs |= {"sparsebench": ours, "sparsebench" + AGAIN: ours}
    seconds, note = settled(runs, rounds)
    rows = [(name, f"{n / statistics.median(each):,.0f}", f"{ratio(seconds['PIL'], each):.2f}")
            for name, each in seconds.items()]  # fmt: skip
    return table((what, "a second", "over PIL"), rows, note)


def growth(rounds: int) -> str:
    """Time whole trainings, including data and network, over numbers of images and epochs."""

    def whole(n: int, epochs: int) -> None:
        task = Composite(test=1, epochs=epochs, batch=64)
        data = task.draw(n, 0, {})
        split = data.train
        train_ = Samples(torch.from_numpy(split.inputs), torch.from_numpy(split.labels), None)
        net = Vit().build(data, 0)
        Training(net, None, train_, task.recipe(), ("order",)).run()

    base, double = 640, {1: "-", 2: 1, 4: 2}
    images: dict[str, Run] = {f"{k * base} images, 1 pass": partial(whole, k * base, 1) for k in double}
    passes: dict[str, Run] = {f"{base} images, {k} passes": partial(whole, base, k) for k in (2, 4)}
    first = next(iter(images))
    seconds, note = settled({**images, **passes, first + AGAIN: images[first]}, rounds)
    rows = []
    for names in ([*images], [first, *passes]):
        for before, name in zip([None, *names], names, strict=False):
            gain = "" if before is None else f"{ratio(seconds[name], seconds[before]):.3f}"
            rows.append((name, f"{statistics.median(seconds[name]):.3f}", gain))
    return table(("training", "seconds", "over the half"), rows, note)


def resident(what: str) -> float:
    """Return "VmRSS" or its peak "VmHWM" of this process in MiB.

    The peak of getrusage would include the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{what}:")[2].split()[0]) / 1024


def peak(name: str, kind: str) -> tuple[float, float]:
    """Return the peak MiB of this process in two training steps, and its MiB before them."""
    with deterministic():
        net = network(name, "cpu")
        actor = {"dense": None, "keep 0.7": topk(net, 0.7), "oracle": oracle(net)}[kind.removesuffix(AGAIN)]
        run, before = step(net, actor, samples(net, SIZES["cpu"][name])), resident("VmRSS")
        run()
        run()
    return resident("VmHWM"), before


def memory() -> str:
    """Compare the peak memory of dense and pruned training steps, each in its own process."""
    rows, spawn = [], multiprocessing.get_context("spawn")
    for name in ("DeiT-S", SMALL):
        found = {}
        for kind in ("dense", "dense" + AGAIN, "keep 0.7", "oracle"):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                most, before = process.submit(peak, name, kind).result()
            found[kind] = most, most - before
        for kind, each in found.items():
            over = (f"{a / b:.3f}" for a, b in zip(each, found["dense"], strict=True))
            rows.append((f"{name}, {SIZES['cpu'][name]}, {kind}", *(f"{mib:.0f}" for mib in each), *over))
    return table(("training step", "peak MiB", "of the step", "peak over dense", "step over dense"), rows)


NETWORKS: tuple[Callable[[str, int], str], ...] = (speed_up, training_step, overhead, halved, attention)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of tables: speed_up, training_step, ...; all unless given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    tables: list[Callable[[], str]] = [partial(part, args.device, args.rounds) for part in NETWORKS]
    if args.device == "cpu":
        tables += [partial(composites, 20_000, 5), partial(augmentation, 10_000, 5), partial(growth, 2), memory]
    with deterministic():
        for one in tables:
            name = getattr(one, "func", one).__name__
            if not args.only or name in args.only:
                print(one(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
