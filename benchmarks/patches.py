"""Compare ways back, and kinds of heads, of predicted patches: the differences of docs/results/patches.md.

    python benchmarks/patches.py RUN

RUN is the folder of the runs that the page names. Differences of intersections over union are paired by picture and
repetition, with 95 % intervals as on boards, which are not corrected for their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from tabulate import tabulate

from sparsebench.board import patches
from sparsebench.board.comparison import Comparison, comparisons_of
from sparsebench.board.reading import frame_of, over_seeds, read
from sparsebench.records.record import canonical
from sparsebench.stats.paired import Results, halves
from sparsebench.stats.targets import combined
from sparsebench.strategy.spec import label

RETURNS = "returns"
"""The parameter of strategies for the block before which tokens come back; 0 without it."""
PARTS = {"accuracy_relevant": "objects, %", "accuracy_irrelevant": "background, %"}


class Options(NamedTuple):
    """What differs between the results of one test: strategy and budget, and how what left is predicted."""

    strategy: str
    params: str
    budget: str
    returns: int
    fill: str
    head: str


class Measured(NamedTuple):
    """The intersection over union of one strategy, and its accuracies on objects and background."""

    iou: Results
    accuracies: list[float]


def measurements(comparison: Comparison) -> Iterator[tuple[Options, Measured]]:
    """Yield what was measured in a comparison, by options."""
    task, _ = comparison.params
    accuracies = over_seeds(comparison.tested, dict.fromkeys(PARTS, "mean"))
    for entry, iou in patches.results_of(comparison.tested).items():
        row = comparison.every.loc[entry]
        params = json.loads(row["strategy_params"])
        returns = params.pop(RETURNS, 0)
        options = Options(row["strategy_name"], canonical(params), row["budget"], returns, task["fill"], task["head"])
        yield options, Measured(iou, accuracies.loc[entry].tolist())


def pairs(measured: dict[Options, Measured]) -> Iterator[tuple[str, Options, Options]]:
    """Yield pairs of options that differ in one thing, with what the first has more than the second."""
    for options in measured:
        if options.head == "own":
            yield "own head - head of dense tokens", options, options._replace(head="dense")
        if options.fill == "nearest":
            yield "membership - nearest kept patch", options._replace(fill="membership"), options
        if options.returns:
            yield "comes back - stays away", options, options._replace(returns=0)


def tests(run: Path) -> dict[str, tuple[bool, dict[Options, Measured]]]:
    """Return for each test of a run whether it has one repetition, and what was measured, by options."""
    of_tests: dict[str, tuple[bool, dict[Options, Measured]]] = {}
    for comparison in comparisons_of(frame_of(read(run))):
        if not comparison.labels_patches:
            continue
        task, model = comparison.params
        others = {name: value for name, value in task.items() if name not in ("fill", "head")}
        test = canonical([others, model, comparison.largest])
        _, measured = of_tests.setdefault(test, (comparison.lone, {}))
        measured.update(measurements(comparison))
    return of_tests


def rows_of(lone: bool, measured: dict[Options, Measured]) -> Iterator[list[str]]:
    """Yield a row for each pair of a test: the difference in points, and both accuracies, the second one first."""
    for what, first, second in sorted(pairs(measured)):
        if not {first, second} <= set(measured):
            continue
        difference = combined([(1.0, measured[first].iou), (-1.0, measured[second].iou)])
        mean = 100 * sum(difference.means.values()) / len(difference.means)
        half = 100 * float(halves([difference], lone)[0])
        accuracies = zip(measured[second].accuracies, measured[first].accuracies, strict=True)
        yield [
            f"{label(first.strategy, json.loads(first.params))}, {first.budget}: {what}",
            f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]",
            *(f"{100 * before:.1f} to {100 * after:.1f}" for before, after in accuracies),
        ]


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(run: Path) -> None:
    """Print the differences of each test."""
    for number, (lone, measured) in enumerate(tests(run).values(), 1):
        rows = list(rows_of(lone, measured))
        if rows:
            print(f"Test {number}\n")
            print(tabulate(rows, ["", "IoU, points", *PARTS.values()], tablefmt="pipe", disable_numparse=True), "\n")


if __name__ == "__main__":
    main()
