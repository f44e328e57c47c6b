"""Positional attention on images: what positions learn about the grid, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Result, Trial, Verdict, interval, judge
from sparsebench_theory.claims import verdicts_of
from sparsebench_theory.panels import legend, points
from sparsebench_theory.trials import columns, differences, ends, mean, values_of

ACCEPTED = 0.05
"""The accuracy that positional attention may cost; the paper's gap on ImageNet is 0.03."""

verdict = verdicts_of(__package__, ACCEPTED=ACCEPTED)
KINDS = {"content": "ordinary", "positional": "positional"}
ORDERS = {False: "patches in plain order", True: "patches in another order"}

Groups = Mapping[tuple[str, bool], Sequence[Trial]]


def images(trials: Sequence[Trial]) -> Result:
    """Accuracy of a small ViT with ordinary and with positional attention; and which positions find each other.

    Neighbour agreement is the share of a patch's neighbours in the image that are among the positions most similar to
    its own in the first block, after a permutation of the patches is undone; its null are shuffled orders.
    """
    groups: Groups = {
        (kind, permuted): [t for t in trials if t.model.attention == kind and t.task.permuted == permuted]
        for kind in KINDS
        for permuted in ORDERS
    }
    rows = []
    for (kind, permuted), group in groups.items():
        row: dict[str, Any] = {"attention": KINDS[kind], "order": ORDERS[permuted], "trials": len(group)}
        for metric in ("accuracy", "neighbour_agreement", "neighbour_agreement_shuffled"):
            measured = mean(values_of([t for t in group if metric in t.values], metric))
            row |= columns(measured, metric, f"{metric} low", f"{metric} high")
        rows.append(row)
    panels: list[Panel] = [partial(_accuracies, rows=rows), partial(_agreements, rows=rows)]
    for permuted, name in ORDERS.items():
        shown = next((t for t in groups["positional", permuted] if not t.diverged), None)
        if shown is not None:
            panels.append(partial(_near_the_middle, trial=shown, title=name))
    group = trials[0].task
    title = f"Positional attention on images ({group.images}; {trials[0].n} training images, {group.epochs} epochs)"
    verdicts = [verdict for permuted in ORDERS for verdict in _claims(groups, permuted)]
    return Result(title, {"images": rows}, panels, verdicts)


def _claims(groups: Groups, permuted: bool) -> list[Verdict]:
    """Return whether positional attention keeps the accuracy, and finds the grid."""
    group, dense = groups["positional", permuted], groups["content", permuted]
    gap = mean(differences(group, dense, "accuracy"))
    lead = mean([
        t.values["neighbour_agreement"] - t.values["neighbour_agreement_shuffled"]  # type: ignore[operator]
        for t in group if not t.diverged
    ])  # fmt: skip
    share = mean(values_of(group, "neighbour_agreement"))
    low, high = ends(gap)
    leads = ends(lead)[0] > 0
    return [
        verdict(
            "as_accurate", f"difference {interval(*gap)}",
            judge([gap[0] >= -ACCEPTED, low >= -ACCEPTED], [high < -ACCEPTED]), order=ORDERS[permuted],
        ),
        verdict(
            "neighbours", f"agreement {interval(*share)}, {interval(*lead)} above shuffled orders",
            judge([leads, leads and ends(share)[0] >= 0.5], [ends(share)[1] < 0.5]),
            order=ORDERS[permuted],
        ),
    ]  # fmt: skip


def _accuracies(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for place, (order, colour) in enumerate(zip(ORDERS.values(), COLOURS, strict=False)):
        shown = [row for row in rows if row["order"] == order]
        triples = [(row["accuracy"], row["accuracy low"], row["accuracy high"]) for row in shown]
        points(axis, np.arange(len(shown)) + 0.1 * place, triples, order, colour)
    axis.set_xticks(range(len(KINDS)), list(KINDS.values()))
    axis.set(title="accuracy, 95 % intervals", ylim=(0, 1), xlim=(-0.5, 1.5))
    legend(axis)


def _agreements(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    shown = [row for row in rows if row["attention"] == "positional"]
    for metric, label, colour in (
        ("neighbour_agreement", "measured", COLOURS[0]),
        ("neighbour_agreement_shuffled", "shuffled orders", COLOURS[5]),
    ):
        triples = [(row[metric], row[f"{metric} low"], row[f"{metric} high"]) for row in shown]
        points(axis, np.arange(len(shown)), triples, label, colour)
    axis.set_xticks(range(len(shown)), [row["order"] for row in shown])
    axis.set(title="neighbours found, positional attention", ylim=(0, None), xlim=(-0.5, 1.5))
    legend(axis)


def put_right(scores: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return scores (D, D) between positions in plain order, from those between positions that show order[i]."""
    back = np.argsort(order)
    return scores[np.ix_(back, back)]


def _near_the_middle(axis: Any, trial: Trial, title: str) -> None:
    """Draw how similar each place of the image is to the one in the middle, permutation undone."""
    similarity = np.array(trial.curves["trained_similarity"])
    N = round(len(similarity) ** 0.5)
    side = round(N**0.5)
    order = trial.task.order()
    middle = (side // 2) * side + side // 2
    shown = put_right(similarity.reshape(N, N), np.arange(N) if order is None else order)[middle]
    shown[middle] = np.nan
    drawn = axis.imshow(shown.reshape(side, side), cmap="viridis")
    axis.figure.colorbar(drawn, ax=axis)
    axis.set(title=f"similarity to the middle, {title}", xlabel="column", ylabel="row")
