"""Measure how far the ranking of tokens stays the same from one block to the next, on a ViT-S/14.

    python benchmarks/consistency.py measure --weights FILE --images folder:DIR --backgrounds DIR2 --out rho.json
    python benchmarks/consistency.py figure rho.json RUN RUN2 --out consistency.png    # and the table of the page

The network is one of leaderboard/vit-s-networks, see `vit_s.py make`. Each ranking is measured in two passes over the
same composites. In the dense pass all tokens stay, and are ranked in each block but the last. In the pass `every` the
strategy acts, at half of the MACs with schedule=every; tokens of a block are compared with their own ranks in the block
before. The consistency is Spearman's rank correlation, mean over images.

Scores rank tokens by themselves. Methods that merge rank pairs: a token is then ranked by the similarity to its most
similar patch, by which `tome` and `tofu` (keys) or `mctf` (tokens) choose, or by the energy of `pitome`. The ranking of
all pairs is measured too, in the dense pass.

RUN and RUN2 are folders of runs that tested the strategies on the network. Accuracies are theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.stats import spearmanr
from tabulate import tabulate
from torch import Tensor
from vit_s import ARCHITECTURE, CANVAS, CLASSES, composites, deep

import sparsebench
from sparsebench import Strategy, TokenView
from sparsebench.measure.selection import rank_correlation
from sparsebench.models.actor import Actor
from sparsebench.models.timm_models import create_vit
from sparsebench.plugin.registry import Registry
from sparsebench.stats import style
from sparsebench.strategy.budget import Budget

BATCH = 20
SIDE = 84
"""Side of the object in pixels: it covers 36 of the 144 patches."""
SHARE = 0.5
"""Share of the dense MACs in the pass `every`."""
Reading = Callable[[Strategy, TokenView], Tensor]
"""A function that returns the (B, M) values by which a strategy ranks, of the N tokens or of pairs."""


def scores(strategy: Strategy, view: TokenView) -> Tensor:
    """Return the scores of a strategy with `scores`."""
    return strategy.scores(view)


def energies(strategy: Strategy, view: TokenView) -> Tensor:
    """Return the scores that a plan has, for `pitome`."""
    plan: Any = strategy.plan(view, view.index.shape[1] - 1)
    values: Tensor = plan.scores
    return values


def similar_keys(_: Strategy, view: TokenView) -> Tensor:
    """Return the cosine of each patch's key with the most similar other key, see `tome`."""
    return _cosines(view.keys.mean(dim=1)).amax(dim=2)


def similar_tokens(_: Strategy, view: TokenView) -> Tensor:
    """Return the cosine of each patch with the most similar other patch, see `mctf`."""
    return _cosines(view.tokens).amax(dim=2)


def pairs_of_keys(_: Strategy, view: TokenView) -> Tensor:
    """Return the cosines of all pairs of keys."""
    return _above_diagonal(_cosines(view.keys.mean(dim=1)))


def pairs_of_tokens(_: Strategy, view: TokenView) -> Tensor:
    """Return the cosines of all pairs of patches."""
    return _above_diagonal(_cosines(view.tokens))


def _cosines(x: Tensor) -> Tensor:
    """Return the (B, N, N) cosines of (B, N, C) vectors, with -2 on the diagonal."""
    unit = F.normalize(x, dim=2)
    return (unit @ unit.mT).masked_fill(torch.eye(x.shape[1], dtype=torch.bool), -2.0)


def _above_diagonal(square: Tensor) -> Tensor:
    """Return the (B, N (N - 1) / 2) entries above the diagonal."""
    i, j = torch.triu_indices(square.shape[1], square.shape[1], 1)
    return square[:, i, j]


class Ranking(NamedTuple):
    """A ranking of tokens or pairs.

    Attributes:
        strategy: the name of the strategy that ranks by it.
        reading: the function that returns its values.
        kind: "token", "pair" or "random".
        acts: whether it is measured in the pass `every`, and has accuracies.
        params: the parameters of the strategy.
    """

    strategy: str
    reading: Reading = scores
    kind: str = "token"
    acts: bool = True
    params: Mapping[str, str] = {}


RANKINGS = {
    "attn_topk(attention=class)": Ranking("attn_topk", params={"attention": "class"}),
    "attn_topk(attention=received)": Ranking("attn_topk", params={"attention": "received"}),
    "attn_topk(attention=mean_query)": Ranking("attn_topk", params={"attention": "mean_query"}),
    "column_norm": Ranking("column_norm"),
    "attn_value_norm": Ranking("attn_value_norm"),
    "value_norm": Ranking("value_norm"),
    "feature_norm": Ranking("feature_norm"),
    "rep_shift": Ranking("rep_shift"),
    "rep_shift(change=added)": Ranking("rep_shift", params={"change": "added"}),
    "rep_shift(change=attention)": Ranking("rep_shift", params={"change": "attention"}),
    "random_inside": Ranking("random_inside", kind="random"),
    "tome": Ranking("tome", similar_keys, "pair"),
    "tofu": Ranking("tofu", similar_keys, "pair"),
    "pitome": Ranking("pitome", energies, "pair"),
    "mctf": Ranking("mctf", similar_tokens, "pair"),
    "all pairs of keys": Ranking("tome", pairs_of_keys, "pair", acts=False),
    "all pairs of tokens": Ranking("mctf", pairs_of_tokens, "pair", acts=False),
}
"""The rankings, by the names of their strategies on boards."""
MARKERS = {"token": "o", "pair": "s", "random": "^"}


# --- Passes

Seen = list[tuple[np.ndarray, np.ndarray]]
"""For each block the (B, N) patches of the tokens, and the (B, M) values by which they are ranked."""


def watched(strategy: Strategy, reading: Reading, seen: Seen, dense: bool) -> Strategy:
    """Return a strategy that adds its ranking to `seen` in each block in which it acts.

    If `dense`, it leaves all tokens as they are.
    """

    class Watched(type(strategy)):  # type: ignore[misc]
        adaptive = dense or strategy.adaptive

        def plan(self, view: TokenView, keep: int) -> Any:
            seen.append((view.index.numpy().copy(), reading(strategy, view).double().numpy()))
            return None if dense else strategy.plan(view, keep)

    return Watched(**strategy.model_dump())


def consistency(seen: Seen) -> np.ndarray:
    """Return (blocks - 1, B) rank correlations between consecutive blocks, over the tokens that are in both."""
    rows = []
    for (index, before), (later, after) in pairwise(seen):
        if before.shape[1] == index.shape[1]:
            of_patch = np.full(seen[0][0].shape, np.nan)
            np.put_along_axis(of_patch, index, before, axis=1)
            before = np.take_along_axis(of_patch, later, axis=1)
        rows.append(rank_correlation(before, after))
    return np.array(rows)


@click.group()
def main() -> None:
    """Measure how far rankings stay the same."""


@main.command()
@click.option("--weights", type=Path, required=True, help="A network of `vit_s.py make`.")
@click.option("--images", required=True, metavar="folder:DIR", help="CIFAR-10.")
@click.option("--backgrounds", required=True, metavar="DIR", help="Photographs.")
@click.option("--number", default=100, show_default=True, help="Number of composites.")
@click.option("--out", type=Path, required=True)
def measure(weights: Path, images: str, backgrounds: str, number: int, out: Path) -> None:
    """Measure all rankings, and write their correlations as JSON. A repeated command continues."""
    vit = create_vit(ARCHITECTURE, CANVAS, CLASSES)
    vit.load_state_dict(load_file(weights))
    network = deep(vit.eval())
    tasks, places = composites(images, backgrounds)
    task = next(task for task in tasks if task.foreground == SIDE)
    inputs = torch.from_numpy(task.draw(1, 0, places).test.inputs[:number])
    results = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for name, ranking in RANKINGS.items():
        if name in results:
            continue
        passes = {"dense": correlations(network, ranking, inputs, dense=True)}
        if ranking.acts:
            passes["every"] = correlations(network, ranking, inputs, dense=False)
        results[name] = {key: np.nanmean(values, axis=1).round(4).tolist() for key, values in passes.items()}
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, {key: round(float(np.mean(values)), 3) for key, values in results[name].items()}, flush=True)


def correlations(network: Any, ranking: Ranking, inputs: Tensor, *, dense: bool) -> np.ndarray:
    """Return (blocks - 1, images) rank correlations of a ranking between consecutive blocks."""
    seen: Seen = []
    strategy = Registry().strategy(ranking.strategy).cls(**ranking.params)
    watching = watched(strategy, ranking.reading, seen, dense)
    blocks = tuple(range(network.cost.depth - 1))  # after the last no choice matters
    everywhere = Budget(counts=(network.cost.tokens - 1,) * len(blocks), blocks=blocks)
    budget = everywhere if dense else Budget(macs=SHARE, schedule="every")
    actor = Actor(watching, budget, network.cost, network.grid, 0)
    parts = []
    for start in range(0, len(inputs), BATCH):
        seen.clear()
        rows = torch.arange(start, min(start + BATCH, len(inputs)))
        with torch.inference_mode():
            network(inputs[rows], actor.begin(rows, 0, None, training=False))
        parts.append(consistency(seen[: len(blocks)]))
    return np.concatenate(parts, axis=1)


# --- Accuracy over consistency


@main.command()
@click.argument("file", type=Path)
@click.argument("runs", type=Path, nargs=-1, required=True)
@click.option("--out", type=Path, required=True, help="The figure.")
def figure(file: Path, runs: tuple[Path, ...], out: Path) -> None:
    """Print the table, and draw accuracy over consistency, a panel for each run and budget."""
    results = json.loads(file.read_text(encoding="utf-8"))
    accuracies = [accuracy_of(run) for run in runs]
    columns = [
        (place, share) for place, table in enumerate(accuracies) for share in sorted({b for _, b in table})[::-1]
    ]
    rows = []
    for name, passes in results.items():
        row: list[Any] = [f"`{name}`" if RANKINGS[name].acts else name, RANKINGS[name].kind]
        row += [f"{value:.2f}" for value in thirds(passes["dense"])]
        row += [f"{mean(passes['dense']):.2f}", f"{mean(passes['every']):.2f}" if "every" in passes else "-"]
        row += [percent(accuracies[place].get((name, share))) for place, share in columns]
        rows.append(row)
    rows.sort(key=lambda row: -float(row[5]))
    headings = ["ranking", "of", "blocks 0-4", "4-7", "7-10", "mean", "every"]
    print(tabulate(rows, [*headings, *(f"{runs[place].name}, {share:g}" for place, share in columns)], "pipe"))
    draw(results, accuracies, [run.name for run in runs], columns, out)


def accuracy_of(run: Path) -> dict[tuple[str, float], float]:
    """Return the accuracies of a run by strategy and budget."""
    records = sparsebench.load_records(run)
    means = records[records["status"] == "ok"].groupby(["strategy", "budget_value"], observed=True)["accuracy"].mean()
    return {(str(name), float(share)): float(value) for (name, share), value in means.items() if name in RANKINGS}


def percent(share: float | None) -> str:
    """Return a share in percent; "-" if it was not measured."""
    return "-" if share is None else f"{100 * share:.1f}"


def mean(values: list[float]) -> float:
    """Return the mean over the pairs of blocks."""
    return float(np.mean(values))


def thirds(values: list[float]) -> list[float]:
    """Return the means over the first four, the next three and the last three pairs of blocks."""
    return [mean(values[:4]), mean(values[4:7]), mean(values[7:])]


def draw(
    results: dict[str, Any],
    accuracies: list[dict[tuple[str, float], float]],
    names: list[str],
    columns: list[tuple[int, float]],
    out: Path,
) -> None:
    """Draw a panel for each run and budget: the accuracy of a strategy over the consistency of its ranking."""
    rows, looks = (len(columns) + 1) // 2, looks_of(list(results))
    with style.sheet():
        picture = style.new(style.COLUMNS["two"], 2.5 * rows, layout="constrained")
        axes = picture.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat
        for axis, (place, share) in zip(axes, columns, strict=False):
            points = {
                name: (mean(passes["dense"]), 100 * accuracies[place][name, share])
                for name, passes in results.items()
                if (name, share) in accuracies[place]
            }
            for name, (x, y) in points.items():
                axis.plot(x, y, label=name, **looks[name])
            rho = spearmanr(*zip(*points.values(), strict=True)).statistic
            axis.set(xlim=(-0.05, 1), ylim=(0, 100), xlabel="consistency in the dense network", ylabel="accuracy, %")
            axis.set_title(f"{names[place]}, {share:g} of the MACs: ρ {rho:.2f}")
            axis.grid(True)
        picture.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=6)
        out.write_bytes(style.content(picture, style.form_of("--out", out)))


def looks_of(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each ranking: a marker for its kind, and colours, then hollow ones, for its kind's members."""
    looks: dict[str, dict[str, Any]] = {}
    for kind, marker in MARKERS.items():
        for place, name in enumerate(name for name in names if RANKINGS[name].kind == kind):
            colour = style.COLOURS[place % len(style.COLOURS)]
            face = colour if place < len(style.COLOURS) else "none"
            looks[name] = {"marker": marker, "color": colour, "markerfacecolor": face, "linestyle": "none"}
    return looks


if __name__ == "__main__":
    main()
