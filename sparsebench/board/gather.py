"""A run's folder as a board: rows, curves, groups, and what lies beside its records."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsebench.board import flat, notes
from sparsebench.board.board import Board, Curve, Group, Row
from sparsebench.board.build import METRICS, build
from sparsebench.board.statistics import LEVEL, mean_interval
from sparsebench.sweep import described, environment

log = logging.getLogger(__name__)

GROUP = "accuracy: "
"""What the names of groups' accuracies begin with."""
OWN_PICTURE = "leaderboard.png"
MOST_BYTES = 1_000_000
"""Of pictures in a board, together; larger ones stay beside it."""
KEY = ("task", "model", "strategy", "kind", "budget", "setting")

Flat = Mapping[str, Any]
Entries = dict[tuple[str, str, str, str, str, str], list[Flat]]


class _Wanted(frozenset[str]):
    """The metrics of a board: METRICS, and the accuracies of groups, whose names the data decide."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(GROUP))


WANTED: Collection[str] = _Wanted(METRICS)


def gather(folder: Path) -> Board:
    """Return the board of a run's folder, from what lies in it alone.

    Raises:
        UserError: the folder holds no records, or some by a later sparsebench.
    """
    return board_of(list(flat.load(folder, WANTED)), folder)


def board_of(records: Sequence[Flat], folder: Path) -> Board:
    """Return the board of some flat records of a run's folder, with what lies beside them."""
    known = described.strategies(folder)
    mine = [known[key] for key in sorted({(_name(r), r["sha256"]) for r in records}) if key in known]
    trained = {one.name: "yes" if one.trained else "no" for one in mine}
    entries = _entries(records)
    rows, by_task = (_marked(build(records, by), trained) for by in (None, "task"))
    return Board(
        rows=rows,
        by_task=by_task,
        notes=notes.notes_on(records),
        curves=_curves(entries),
        groups=_groups(entries),
        bibtex=sorted({one.bibtex.strip() for one in mine} - {""}),
        environments=_environments(folder, {r["environment"] for r in records}),
        suites=[f"{suite.name}, version {suite.version}" for suite in described.suites(folder)],
        pictures=_pictures(folder),
    )


def _name(record: Flat) -> str:
    """Return the name of a record's strategy: its label without parameters."""
    return str(record["strategy"]).partition("(")[0]


def _marked(rows: list[Row], trained: Mapping[str, str]) -> list[Row]:
    """Return rows that say whether their strategies are trained, where that is known."""
    return [row | {"trained": row.get("trained") or trained.get(_name(row))} for row in rows]


def _entries(records: Iterable[Flat]) -> Entries:
    """Return the good records by KEY, in one order: those of a row of the board by task."""
    found: Entries = defaultdict(list)
    for r in records:
        if r["status"] == "ok":
            task, model, strategy, kind, budget, setting = (r[name] for name in KEY)
            found[task, model, strategy, kind, budget, setting].append(r)
    for own in found.values():
        own.sort(key=lambda r: (r["n_train"], r["repetition"], r["cell_id"]))
    return dict(sorted(found.items()))


def _has(record: Flat, metric: str) -> bool:
    value = record.get(metric)
    return value is not None and not math.isnan(value)


def _curves(entries: Entries) -> list[Curve]:
    """Return the success rates by number of training samples, where trials have a criterion."""
    found = []
    for (task, model, strategy, kind, budget, _), own in entries.items():
        trials: dict[int, list[float]] = defaultdict(list)
        for r in own:
            if _has(r, "success"):
                trials[r["n_train"]].append(r["success"])
        if not trials:
            continue
        n = tuple(map(len, trials.values()))
        rates = tuple(sum(one) / len(one) for one in trials.values())
        low, high = zip(*map(wilson, rates, n), strict=True)
        found.append(Curve(task, model, strategy, kind, budget, tuple(trials), rates, low, high, n))
    return found


def wilson(rate: float, n: int) -> tuple[float, float]:
    """Return the Wilson 95 % interval of a success rate of n trials.

    Written out: importing scipy.stats takes longer than making a board.
    """
    from scipy.special import ndtri

    z2 = float(ndtri(0.5 + LEVEL / 2)) ** 2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (rate * (1 - rate) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def _groups(entries: Entries) -> list[Group]:
    """Return each group's accuracy, mean over seeds at the largest number of training samples."""
    found = []
    for (task, model, strategy, kind, budget, _), own in entries.items():
        largest = [r for r in own if r["n_train"] == own[-1]["n_train"]]
        for metric in sorted(name for name in own[0] if name.startswith(GROUP)):  # flat records have the same keys
            if not (values := [r[metric] for r in largest if _has(r, metric)]):
                continue
            mean, *interval = mean_interval(values)
            low, high = (None if x is None else min(1.0, max(0.0, x)) for x in interval)
            found.append(
                Group(task, model, strategy, kind, budget, metric.removeprefix(GROUP), mean, low, high, len(values))
            )
    return found


def _environments(folder: Path, wanted: set[str]) -> dict[str, dict[str, str]]:
    found = {}
    for name in sorted(wanted - {""}):
        path = folder / environment.FOLDER / f"{name}.json"
        try:
            found[name] = {str(key): str(value) for key, value in sorted(json.loads(path.read_bytes()).items())}
        except (OSError, ValueError, AttributeError) as error:
            log.warning("%s is left out: %s", path, error)
    return found


def _pictures(folder: Path) -> dict[str, bytes]:
    """Return the PNG files of a folder by name, without the board's own, as many as there is room for."""
    found, room = {}, MOST_BYTES
    for path in sorted(folder.glob("*.png")):
        if path.name == OWN_PICTURE or path.stat().st_size > room:
            continue
        found[path.stem] = path.read_bytes()
        room -= len(found[path.stem])
    return found
