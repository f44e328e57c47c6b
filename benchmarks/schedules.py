"""Compare schedule=auto with every candidate schedule, by accuracy on test images.

    python benchmarks/schedules.py embedded --out embedded.jsonl
    python benchmarks/schedules.py vit-s --weights DIR --images folder:DIR --backgrounds DIR2 --out vit-s.jsonl
    python benchmarks/schedules.py show embedded.jsonl        # tables for RESULTS.md

The choice is made as in a run. Then each candidate is tested on the images of the run. The regret of a choice is the
accuracy of the candidate that is best in the test minus the accuracy of the chosen candidate. The same command
continues a stopped measurement.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from tabulate import tabulate

from sparsebench.models.actor import Actor
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context, Prepared, prepare
from sparsebench.runner.run import plan_of
from sparsebench.runner.run_cell import deterministic
from sparsebench.strategy.budget import AUTO, Budget
from sparsebench.training.evaluation import evaluate

STRATEGIES = ("attn_topk", "divprune", "tome", "pitome", "patch_variance", "random_inside")


def measure(request: Request, files: Files, out: Path) -> None:
    """Measure the jobs of a request that have no line in the file yet, and append a line for each."""
    registry, execution = Registry(), Execution(jobs=0, device="cpu")
    with TemporaryDirectory() as folder:
        plan = plan_of(request, files, execution, registry, Path(folder))
    jobs = [job for job in plan.jobs if job.requested and job.cell.budget.schedule == AUTO]
    done = {line["cell"] for line in lines_of(out)}
    context = Context(RunEnvironment(Path(folder), "cpu", plan.locations, execution))
    with deterministic():
        for job in sorted(jobs, key=lambda job: job.cell.repetition):
            if job.cell.id in done:
                continue
            line = json.dumps(measurement(job, registry, context))
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the measurements in a file; none if it does not exist."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def measurement(job: Job, registry: Registry, context: Context) -> dict[str, Any]:
    """Return the choice of a job's cell, and the test accuracies of all candidates and of the dense network."""
    begun = time.process_time()
    cell = prepare(job, registry, context)
    seconds = time.process_time() - begun
    assert cell.schedule is not None
    rows = []
    for candidate in cell.schedule.candidates:
        budget = Budget(counts=candidate.counts, blocks=candidate.blocks)
        begun = time.process_time()
        share = accuracy(cell, budget)
        rows.append(candidate.model_dump() | {"accuracy": share, "seconds": time.process_time() - begun})
    return {
        "cell": job.cell.id,
        "strategy": job.label,
        "macs": job.cell.budget.macs,
        "network": job.cell.network or job.cell.repetition,
        "task": job.cell.task.params.get("foreground"),
        "images": len(cell.test.labels),
        "dense": accuracy(cell, None),
        "chosen": cell.schedule.chosen,
        "seconds": seconds,
        "candidates": rows,
    }


def accuracy(cell: Prepared, budget: Budget | None) -> float:
    """Return the test accuracy with a budget, as a run of a cell with this budget measures it."""
    actor = None
    if budget is not None:
        assert cell.actor is not None
        actor = Actor(cell.actor.strategy, budget, cell.network.cost, cell.network.grid, cell.actor.stream)
    evaluation = evaluate(cell.network, actor, cell.test, cell.recipe)
    return float(np.mean(evaluation.predicted == evaluation.labels))


@click.group()
def main() -> None:
    """Compare schedule=auto with every candidate."""


@main.command()
@click.option("--out", type=Path, required=True)
@click.option("--networks", default=24, show_default=True)
@click.option("--images", default=2000, show_default=True)
def embedded(out: Path, networks: int, images: int) -> None:
    """The networks of the suite embedded."""
    plugins = [f"{name}:schedule=auto" for name in STRATEGIES]
    request = Request(
        plugins=plugins, suite="embedded", tasks=f"composite:test={images}", macs=(0.5, 0.4, 0.3), seeds=networks
    )
    measure(request, Files(), out)


@main.command("vit-s")
@click.option("--out", type=Path, required=True)
@click.option("--weights", type=Path, required=True, help="Folder of `benchmarks/vit_s.py make`.")
@click.option("--images", required=True)
@click.option("--backgrounds", required=True)
@click.option("--test", default=400, show_default=True, help="Number of test images.")
@click.option("--foreground", default="84", show_default=True, help="Sides of the object in pixels.")
def vit_s(out: Path, weights: Path, images: str, backgrounds: str, test: int, foreground: str) -> None:
    """The networks of leaderboard/vit-s-networks."""
    plugins = [f"{name}:schedule=auto" for name in STRATEGIES]
    request = Request(
        plugins=plugins,
        tasks=f"composite:foreground={foreground},placement=tiles,test={test}",
        model="timm:vit_small_patch14_dinov2",
        macs=(0.5, 0.3),
        precision="bfloat16",
    )
    measure(request, Files(images=images, backgrounds=backgrounds, weights=sorted(weights.glob("*.safetensors"))), out)


@main.command()
@click.argument("file", type=Path)
def show(file: Path) -> None:
    """Print the regrets, and the accuracy of each candidate."""
    lines = lines_of(file)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["strategy"], line["macs"], line["task"]].append(line)
    regrets, table = [], []
    names: dict[str, None] = {}
    for (strategy, macs, task), group in sorted(groups.items(), key=lambda item: (item[0][0], -item[0][1])):
        chosen = [line["candidates"][line["chosen"]]["accuracy"] for line in group]
        best = [max(candidate["accuracy"] for candidate in line["candidates"]) for line in group]
        first = [line["candidates"][0]["accuracy"] for line in group if line["candidates"][0]["name"] == "default"]
        regret = np.mean(np.array(best) - np.array(chosen))
        means = [100 * np.mean(values) if values else "-" for values in (first, chosen, best)]
        regrets.append([strategy, macs, task, len(group), *means, 100 * regret])
        accuracies: dict[str, list[float]] = defaultdict(list)
        picked: dict[str, int] = defaultdict(int)
        for line in group:
            for number, candidate in enumerate(line["candidates"]):
                accuracies[candidate["name"]].append(candidate["accuracy"])
                picked[candidate["name"]] += number == line["chosen"]
        names |= dict.fromkeys(accuracies)
        row = {name: f"{100 * np.mean(values):.1f} ({picked[name]})" for name, values in accuracies.items()}
        table.append({"strategy": strategy, "macs": macs, "task": task} | row)
    headers = ["strategy", "MACs", "side", "networks", "default", "auto", "best in test", "regret"]
    click.echo(tabulate(regrets, headers, tablefmt="github", floatfmt=".1f"))
    click.echo()
    columns = ["strategy", "macs", "task", *names]
    click.echo(tabulate([[row.get(name, "") for name in columns] for row in table], columns, tablefmt="github"))
    choice, tests = (sum(line["seconds"] for line in lines), len(lines))
    click.echo(f"\nThe choices took {choice:.0f} s of CPU time, {choice / tests:.2f} s each, with data and network.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
