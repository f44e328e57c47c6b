"""A run's folder as a board: rows, curves, groups, and what lies beside its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from sparsebench.board import critical, notes, picture_input, reading
from sparsebench.board.board import Board, Curve, Group
from sparsebench.board.build import Flats, judge
from sparsebench.board.entries import METRICS, Entry, Setting, add_titles, frame_of, settings_of
from sparsebench.records import environment, files, manifests
from sparsebench.stats.intervals import mean_interval, wilson
from sparsebench.text import plain

GROUP = "accuracy: "
"""What the names of groups' accuracies begin with."""
OWN_PICTURE, PNG = "leaderboard", b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1_000_000
"""Of pictures in a board, together; larger ones stay beside it."""
CRITICAL = "critical-difference"


class _Wanted(frozenset[str]):
    """The metrics of a board: METRICS, and the accuracies of groups, whose names the data decide."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(GROUP))


WANTED = _Wanted(METRICS)


def gather(folder: Path) -> Board:
    """Return the board of a run's folder, from what lies in it alone.

    Raises:
        UserError: the folder holds no records, or some by a later sparsebench.
    """
    return board_of(reading.read(folder, WANTED), folder)


def board_of(records: Flats, folder: Path) -> Board:
    """Return the board of some flat records of a run's folder, with what lies beside them."""
    frame = frame_of(records)
    over_all, by_task = judge(frame), judge(frame, "task")
    settings, pictures = add_titles(settings_of(frame)), _pictures(folder)
    asked = (suite for suite in manifests.suites(folder) if suite.name != manifests.OWN)
    suites = (plain(f"{suite.name}, version {suite.version}") for suite in asked)
    if (diagram := critical.critical(by_task.rankings)) is not None:
        pictures = {CRITICAL: critical.draw(diagram)} | pictures
    return Board(
        rows=over_all.rows,
        by_task=by_task.rows,
        notes=notes.notes_on(frame, over_all.single, folder),
        columns=over_all.columns,
        over_budgets=next(iter(over_all.budgets), None),
        budgets=by_task.budgets,
        curves=[_curve(*each) for each in _entries(settings) if each[1].trials is not None],
        groups=[group for each in _entries(_largest(settings)) for group in _groups(*each)],
        bibtex=bibtex(folder, frame),
        environments=environment.read(folder, set(frame["environment"])),
        suites=list(dict.fromkeys(suites)),  # one that was asked for with other words is there again
        pictures=pictures,
        data={one.task: words for one in settings if (words := picture_input.data_of(one))},
        networks={one.task: words for one in settings if (words := picture_input.networks_of(one))},
    )


def bibtex(folder: Path, frame: pd.DataFrame) -> list[str]:
    """Return the entries of what the strategies of a board cite."""
    known = manifests.strategies(folder)
    pairs = frame[["strategy", "revision"]].drop_duplicates().itertuples(index=False)
    sources = {(label.partition("(")[0], revision) for label, revision in pairs}
    entries = (known[key].bibtex.strip().splitlines() for key in sources if key in known)
    return sorted({"\n".join(map(plain, lines)) for lines in entries} - {""})


_About = tuple[str, str, str, str, str]
"""Task, model, strategy, kind and budget."""


def _entries(settings: Iterable[Setting]) -> Iterator[tuple[_About, Entry]]:
    for one in settings:
        for key, entry in one.entries.items():
            yield (one.task, one.model, *key), entry


def _largest(settings: Iterable[Setting]) -> list[Setting]:
    """Return of settings that differ in size alone the largest."""
    return list(
        {(one.task, one.setting, one.track): one for one in sorted(settings, key=lambda one: one.n_train)}.values()
    )


def _curve(about: _About, entry: Entry) -> Curve:
    """Return the success rates by number of training samples."""
    values = entry.column("success")
    known = ~np.isnan(values)
    sizes, place = np.unique(entry.sizes[known], return_inverse=True)
    n, wins = np.bincount(place), np.bincount(place, weights=values[known])
    rates = wins / n
    low, high = wilson(rates, n)
    return Curve(*about, *(tuple(x.tolist()) for x in (sizes, rates, low, high, n)))


def _groups(about: _About, entry: Entry) -> Iterator[Group]:
    """Yield each group's accuracy, mean over seeds at the largest number of training samples."""
    largest = entry.at(int(entry.sizes.max()))
    for metric in sorted(name for name in entry.columns.frame if name.startswith(GROUP)):
        values = list(largest.by_seed(metric).values())
        if values:
            mean, *interval = mean_interval(values)
            low, high = (None if x is None else min(1.0, max(0.0, x)) for x in interval)
            yield Group(*about, metric.removeprefix(GROUP), mean, low, high, len(values))


def _pictures(folder: Path) -> dict[str, bytes]:
    """Return the PNG files of a folder by name, without the board's own, as many as there is room for."""
    pictures, room = {}, MOST_BYTES
    for path in files.files_in(folder.resolve(), ".png"):
        content = None if path.name.startswith(OWN_PICTURE) else files.content_or_none(path, room)
        if content is not None and content.startswith(PNG):
            pictures[plain(path.stem)] = content
            room -= len(content)
    return pictures
