"""Measure the overhead of a run over a folder of pictures besides networks and decoding, and the load of the device.

    python benchmarks/data_path.py [--pictures 10000] [--arch test_vit] [--simulate | --gpu]

Pictures are JPEG files of mixed sizes in class folders with WordNet ids, some of them grey or CMYK. Weights are random.
Strategies are tested at three budgets: first in this process, where CPU seconds are counted by purpose; then two of
them by two workers, whose memory is measured and whose system calls are counted if strace is installed.

With --simulate the network is a simulated device beside the host, like a GPU, with a given number of images per second.
The output is the share of a test's time in which the device is busy: with pixels on the device, and with pixels that
the host copies from a file for each batch. Time is the host's CPU time, so that other work on the machine does not
count.

With --gpu DeiT-S is tested in bfloat16 on the GPU instead, and the output is the share of the test's wall time in which
a kernel runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

import sparsebench
from sparsebench.files import CACHE
from sparsebench.records import store
from sparsebench.tasks.sources.labels import imagenet_classes as classes

CLASSES = 100
STRATEGIES = ("attn_topk", "noise", "random", "random_inside", "tome", "tofu", "evit", "pitome")
BUDGETS = (0.7, 0.5, 0.3)


def make(root: Path, n: int) -> None:
    """Write n pictures: waves with noise, sides of 150 to 500 pixels, one in 20 grey and one in 40 CMYK."""
    rng = np.random.default_rng(0)
    for i in range(n):
        path = root / "val" / classes()[(i % CLASSES) * 10] / f"{i:06}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(150, 501, 2)
        small = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        waves = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))
        noisy = waves ^ rng.integers(0, 8, waves.shape, dtype=np.uint8)
        mode = "L" if i % 20 == 0 else "CMYK" if i % 40 == 1 else "RGB"
        Image.fromarray(noisy).convert(mode).save(path, quality=85)


def weigh(path: Path, arch: str) -> None:
    """Write random weights whose predictions differ between pictures."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=1000)
    with torch.no_grad():
        model.head.weight.normal_()
    save_file(model.state_dict(), path)


class Account:
    """CPU seconds of this process by purpose. A counted call within another counted call counts only for itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.within: list[str] = ["the rest"]
        self.since = time.process_time()

    def turn(self) -> None:
        """Add the seconds since the last call to the current purpose."""
        now = time.process_time()
        self.seconds[self.within[-1]] += now - self.since
        self.since = now

    def watch(self, module: Any, name: str, what: str) -> None:
        """Count the seconds of a module's function for the purpose `what`."""
        function: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self.within.append(what if self.within[-1] != "the check against labels" else self.within[-1])
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.within.pop()

        setattr(module, name, counted)


def arguments(root: Path, arch: str, weights: Path) -> list[str]:
    """Return the arguments of the command."""
    plugins = [word for name in STRATEGIES[-4:-2] for word in ("--plugin", name)]
    return ["run", "--suite", "imagenet", "--model", f"timm:{arch}", "--weights", str(weights), "--images",
            f"folder:{root}", "--macs", "0.5", *plugins]  # fmt: skip


def count_seconds(root: Path, arch: str, weights: Path, out: Path) -> None:
    """Run in this process and print the CPU seconds by purpose."""
    import timm  # noqa: F401  its import does not count for the run

    from sparsebench.records import store as records
    from sparsebench.runner import prepare, run_cell
    from sparsebench.runner import run as runs
    from sparsebench.training import evaluation

    account = Account()
    account.watch(evaluation, "outputs_of", "networks and strategies")
    account.watch(runs, "decode", "decoding")
    account.watch(run_cell, "check_leaks", "the check against labels")
    account.watch(runs, "plan_of", "planning: listing and hashing among it")
    account.watch(prepare, "_data", "drawing")
    account.watch(run_cell, "prepare", "making networks")
    account.watch(run_cell, "measure", "testing, but for the network")
    account.watch(run_cell, "seconds_per_batch", "timing a batch, where a test has fewer than seven")
    account.watch(records, "seal", "sealing records")
    words = {"model": f"timm:{arch}", "weights": weights, "images": f"folder:{root}", "macs": BUDGETS, "jobs": 0}
    account.since = time.process_time()
    sparsebench.run(STRATEGIES, suite="imagenet", out=out, **words)  # type: ignore[arg-type]
    account.turn()
    total = sum(account.seconds.values())
    for what, seconds in sorted(account.seconds.items(), key=lambda pair: -pair[1]):
        print(f"{what}: {seconds:.1f} CPU seconds, {seconds / total:.2%}")
    apart = sum(account.seconds[what] for what in ("networks and strategies", "decoding"))
    print(f"neither networks nor decoding: {1 - apart / total:.2%} of {total:.0f} CPU seconds")


def sizes(out: Path) -> None:
    """Print the size of the records."""
    number = len(store.read(out))
    sealed = sum(path.stat().st_size for path in out.rglob("*.parquet"))
    print(f"{number} records, {sealed / number / 1000:.1f} kB each when they are sealed")


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, and their children."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
        except OSError:
            continue
    return found


def look_at_workers(root: Path, arch: str, weights: Path, out: Path) -> None:
    """Run with two workers. Print the peak memory of a process, and the numbers of openings of pictures and folders."""
    from sparsebench.runner.process import memory_over

    program = [sys.executable, "-m", "sparsebench", *arguments(root, arch, weights), "--out", str(out), "--jobs", "2"]
    trace = out.with_suffix(".calls")
    if strace := shutil.which("strace"):
        program = [strace, "-f", "-qq", "--seccomp-bpf", "-e", "trace=openat", "-o", str(trace), *program]
    running = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while running.poll() is None:
        most = max([most, *(memory_over([pid], 0) for pid in descendants(running.pid))])
        time.sleep(1)
    assert running.returncode == 0, program
    print(f"the most that one process held, without pages of files: {most / 1e9:.2f} GB")
    if strace:
        opened = [line.split('"')[1] for line in trace.read_text(errors="replace").splitlines() if f'"{root}' in line]
        pictures = [path for path in opened if path.endswith(".JPEG")]
        folders = len(opened) - len(pictures)
        print(f"each picture opened {len(pictures) / len(set(pictures)):.2f} times, {folders} openings of folders")


def simulate(rate: float, n: int) -> None:
    """Print the share of a test's time in which a device with `rate` images per second is busy."""
    import torch

    from sparsebench.models.deep import DeepViT, small_vit
    from sparsebench.tasks.folder import Folder
    from sparsebench.training.evaluation import BATCH, evaluate
    from sparsebench.training.steps import Samples

    network = DeepViT(small_vit(224, 1000, dim=16, depth=1, heads=1, patch=16))

    class Device:
        """Processes batches one after the other. A call returns at once, as on a GPU."""

        cost, module = network.cost, network.module

        def __init__(self, place: torch.Tensor | None) -> None:
            self.start = self.free = time.process_time()
            self.busy, self.place = 0.0, place

        def __call__(self, inputs: torch.Tensor, acting: object = None) -> torch.Tensor:
            if self.place is not None:
                self.place[: len(inputs)].copy_(inputs)
            self.busy += len(inputs) / rate
            self.free = max(self.free, time.process_time()) + len(inputs) / rate
            return torch.zeros(len(inputs), 1000)

    with TemporaryDirectory() as folder:
        shape = (n, 3, 224, 224)
        mapped = np.lib.format.open_memmap(Path(folder) / "pixels.npy", mode="w+", dtype=np.uint8, shape=shape)
        for first in range(0, n, 1000):
            mapped[first : first + 1000] = 7
        mapped.flush()
        inputs, labels = torch.from_numpy(mapped), torch.arange(n) % 1000
        staged = torch.zeros(BATCH, *shape[1:], dtype=torch.uint8)
        for name, place in (("streamed", staged), ("resident", None)):
            device = Device(place)
            evaluate(device, None, Samples(inputs, labels, None), Folder(images="folder-0").recipe(), BATCH)
            taken = max(device.free, time.process_time()) - device.start
            host = time.process_time() - device.start
            print(
                f"{rate:,.0f} images/s, {name}: busy {device.busy / taken:.1%}, host {host / n * 1e6:.0f} µs a picture"
            )


def on_gpu(n: int) -> None:
    """Print the share of a test's time in which a GPU computes, for n pictures of 224 x 224."""
    import torch
    from sparsebench_plugins.attn_topk import AttnTopK
    from sparsebench_plugins.evit import EViT
    from sparsebench_plugins.tome import ToMe
    from torch.autograd import DeviceType

    from sparsebench.models.actor import Actor
    from sparsebench.models.deep import DeepViT
    from sparsebench.models.timm_models import create_vit
    from sparsebench.strategy.budget import Budget
    from sparsebench.tasks.folder import Folder
    from sparsebench.training.evaluation import BATCH, evaluate
    from sparsebench.training.steps import Samples

    def busy(profile: Any) -> float:
        """Return the seconds in which at least one kernel ran. Copies are not kernels."""
        spans = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in profile.profiler.kineto_results.events()
            if event.device_type() == DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset"))
        )
        total = end = 0
        for start, stop in spans:
            total += max(0, stop - max(start, end))
            end = max(end, stop)
        return total / 1e9

    torch.manual_seed(0)
    network = DeepViT(create_vit("deit_small_patch16_224", 224, 1000).cuda(), precision="bfloat16")
    host = torch.randint(0, 256, (1000, 3, 224, 224), dtype=torch.uint8).repeat(n // 1000, 1, 1, 1)
    labels, recipe = torch.arange(len(host), device="cuda") % 1000, Folder(images="folder-0").recipe()
    settings = [(AttnTopK(), {"macs": 0.5}), (EViT(), {"keep_rate": 0.7}), (ToMe(), {"per_block": 13})]
    actors = [Actor(strategy, Budget(**budget), network.cost, network.grid, 0) for strategy, budget in settings]
    for place, inputs in (("resident", host.cuda()), ("streamed", host)):
        for actor in (None, *actors):
            samples = Samples(inputs, labels, None)
            evaluate(network, actor, Samples(inputs[:1000], labels[:1000], None), recipe, BATCH)  # warm-up
            start = time.perf_counter()
            evaluate(network, actor, samples, recipe, BATCH)
            wall, cpu = time.perf_counter() - start, time.process_time()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                start = time.perf_counter()
                evaluate(network, actor, samples, recipe, BATCH)
                seen = time.perf_counter() - start
            spent, name = time.process_time() - cpu, actor.strategy.name if actor else "dense"
            print(
                f"{name}, {place}: {len(host) / wall:,.0f} images/s; profiled {len(host) / seen:,.0f} images/s, "
                f"the GPU computes {busy(profile) / seen:.1%}, host {spent / len(host) * 1e6:.0f} µs a picture",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--arch", default="test_vit")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    if given.gpu:
        on_gpu(given.pictures)
        return
    if given.simulate:
        for rate in (2500.0, 10_000.0):
            simulate(rate, given.pictures)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory() as place:
        root, weights = Path(place) / "pictures", Path(place) / "weights.safetensors"
        make(root, given.pictures)
        weigh(weights, given.arch)
        for name, measure in (("here", count_seconds), ("workers", look_at_workers)):
            os.environ[CACHE] = str(Path(place) / f"cache-{name}")
            measure(root, given.arch, weights, Path(place) / name)
        sizes(Path(place) / "here")


if __name__ == "__main__":
    main()
