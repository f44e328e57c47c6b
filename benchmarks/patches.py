"""Compare ways back, and kinds of heads, of predicted patches: the differences of docs/results/patches.md.

    python benchmarks/patches.py RUN

RUN is the folder of the runs that the page names, of one repetition. A difference of intersections over union is paired
by picture: records of the same task, model and number of training images have the same test. Its 95 % interval is that
of a mean of pseudo-values over pictures, as on boards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from scipy.stats import t
from tabulate import tabulate

from sparsebench.measure.patches import Overlap
from sparsebench.records import store
from sparsebench.records.record import Record, canonical, numbers_of

BACK = "returns=-1"
PARTS = ("accuracy_relevant", "accuracy_irrelevant")


class Way(NamedTuple):
    """How a strategy is measured: its name, and the parameters of the task that differ."""

    strategy: str
    fill: str
    head: str


def differences(records: dict[Way, Record]) -> Iterator[tuple[str, Record, Record]]:
    """Yield what is compared, and the two records of which the first minus the second counts."""
    for way, record in records.items():
        name = way.strategy
        usual = Way(name, "membership", "dense")
        if way.head == "own" and usual in records:
            yield f"{name}: own head - head of dense tokens", record, records[usual]
        if way.fill == "nearest" and usual in records:
            yield f"{name}: membership - nearest kept patch", records[usual], record
        if way.head == "dense" and BACK in name:
            dropped = way._replace(strategy=name.replace(f"({BACK})", ""))
            if dropped in records:
                yield f"{name}: comes back - stays away", record, records[dropped]


def scores(record: Record) -> tuple[list[int], np.ndarray]:
    """Return the numbers of a record's pictures, and the (pictures,) pseudo-values of its intersection over union."""
    outcomes = record.outcomes
    assert outcomes is not None
    predicted, labels, of_items = (
        numbers_of(values, outcomes.n) for values in (outcomes.predicted, outcomes.label, outcomes.foreground)
    )
    pictures, units = np.unique(of_items, return_inverse=True)
    return pictures.tolist(), Overlap.of(predicted, labels, units).scores()


def interval(first: Record, second: Record) -> tuple[float, float, float]:
    """Return the difference of two intersections over union in points, with the ends of its interval."""
    (pictures, ours), (others, theirs) = scores(first), scores(second)
    assert pictures == others
    values = 100 * (ours - theirs)
    mean, error = values.mean(), values.std(ddof=1) / np.sqrt(len(values))
    half = t.ppf(0.975, len(values) - 1) * error
    return mean, mean - half, mean + half


def test_of(record: Record) -> str:
    """Return in one line what records of the same test and network share."""
    cell = record.cell
    task = {name: value for name, value in cell.task.params.items() if name not in ("fill", "head")}
    network = [cell.model.model_dump(mode="json"), None if cell.init is None else cell.init.id]
    return canonical([task, network, cell.precision, cell.n_train, cell.repetition])


def tests(run: Path) -> dict[str, dict[Way, Record]]:
    """Return the records with a result, by test and way."""
    of_tests: dict[str, dict[Way, Record]] = {}
    for record in store.read(run).values():
        if record.outcomes is not None:
            params = record.cell.task.params
            way = Way(record.label, str(params["fill"]), str(params["head"]))
            of_tests.setdefault(test_of(record), {})[way] = record
    return of_tests


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(run: Path) -> None:
    """Print the differences of each test."""
    for test, records in tests(run).items():
        rows = []
        for name, first, second in sorted(differences(records), key=lambda each: each[0]):
            row = [name, "{:+.1f} [{:+.1f}, {:+.1f}]".format(*interval(first, second))]
            for part in PARTS:
                values = [record.metrics[part].value for record in (second, first)]
                row.append(" to ".join("-" if value is None else f"{100 * value:.1f}" for value in values))
            rows.append(row)
        if rows:
            print(test)
            print(tabulate(rows, headers=["", "IoU, points", "objects, %", "background, %"], disable_numparse=True))


if __name__ == "__main__":
    main()
