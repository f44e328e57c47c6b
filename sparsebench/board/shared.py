"""Shared boards: the records of several folders on one board, each strategy with who reported it.

Results are ranked together only if they are of the same cells. Baselines are taken from the first folder that has them.
A later folder whose dense network gives other results in the same cells, beyond rounding, is not ranked: its
strategies then have a table of their own, with differences to its own dense network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board import views
from sparsebench.board.board import Board, bibtex
from sparsebench.board.citations import once
from sparsebench.board.columns import NOT_RANKED, Column, Row
from sparsebench.board.judge import Leaderboard, Ranking, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.ranks import remove_ranks
from sparsebench.board.reading import DECLARED, DENSE, MAIN, SUCCESS, read
from sparsebench.board.tables import Report, Table
from sparsebench.errors import plain
from sparsebench.records import manifests
from sparsebench.records.record import numbers_of
from sparsebench.records.store import Store
from sparsebench.records.table import ITEMS, LABELS, PREDICTIONS
from sparsebench.stats.paired import mcnemar

ALPHA, EQUAL = 0.01, 0.005
"""Two dense networks differ if McNemar's test says so at this level and their accuracies differ by more than EQUAL."""
MAINTAINERS = "maintainers"
SUITE = Column("suite", "suite", "text", "suite and version, with its state", tables=False)
COLUMNS = (
    Column("authors", "by", "text", "who reported it"),
    Column("replayed", "replayed", "text", "who has run cells of it again, with the same results, and when"),
    Column("date", "date", "text", "day of its newest cell"),
    Column("paper", "paper", "link", ""),
    Column("code", "code", "link", ""),
    Column("licence", "licence", "text", "licence of the strategy's code"),
    Column("affiliation", "affiliation", "text", "where its authors work"),
    Column("note", "note", "text", "a line by its authors"),
)
"""Columns of rows that say who reported them."""
BESIDE_NAMES = ("badge", "authors", "replayed", "date", "paper", "code")
"""Keys of the columns that follow the strategy's name in tables."""


class Part(NamedTuple):
    """The records of one folder for a shared board.

    Attributes:
        folder: the folder.
        strategy: the strategy whose records are added, with baselines that are not on the board yet; "" for all.
        origins: words that distinguish it from parts with a strategy of the same name, the shortest first.
        badge: the badge of the strategy, if any.
        values: values of COLUMNS for its rows.
    """

    folder: Path
    strategy: str = ""
    origins: Sequence[str] = ()
    badge: str = ""
    values: Mapping[str, str] = {}


class Shared(NamedTuple):
    """A shared board.

    Attributes:
        title: suite and version, with its state.
        board: the board.
        ranked: whether its rows are ranked.
    """

    title: str
    board: Board
    ranked: bool = True


def shared(title: str, parts: Sequence[Part]) -> list[Shared]:
    """Return the board of parts with the same cells, then those of parts whose dense network gives other results."""
    together: list[tuple[Part, pd.DataFrame]] = []
    apart: list[tuple[Part, pd.DataFrame]] = []
    for part in parts:
        badges = {part.strategy: part.badge} if part.badge else {}
        frame = read(part.folder, badges=badges)
        same = all(_same_dense(other, frame) for _, other in together[:1])
        (together if same else apart).append((part, frame))

    names = _names([*together, *apart])
    boards = [Shared(title, _board_of(together, names[: len(together)]))]
    for one, words_of_one in zip(apart, names[len(together) :], strict=True):
        name = one[0].strategy or MAINTAINERS
        words = "its dense network gives other results in the same cells, so it is not ranked with others"
        board = _without_ranks(_board_of([one], [words_of_one]))
        boards.append(Shared(f"{title}, {plain(name, 60)}: {words}", board, ranked=False))
    return boards


def _same_dense(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    """Return whether dense networks have the same test items in the cells of both tables, and accuracies as close."""
    by_cell = [
        frame[(frame["strategy"].astype(str) == DENSE) & (frame["status"].astype(str) == "ok")].set_index("cell_id")
        for frame in (first, second)
    ]
    common = sorted(set(by_cell[0].index) & set(by_cell[1].index))
    hits: list[list[np.ndarray]] = [[], []]
    for cell_id in common:
        rows = [frame.loc[cell_id] for frame in by_cell]
        labels = [numbers_of(row[LABELS], row[ITEMS]) for row in rows]
        if not np.array_equal(labels[0], labels[1]):
            return False
        for row, truth, of_frame in zip(rows, labels, hits, strict=True):
            of_frame.append(numbers_of(row[PREDICTIONS], row[ITEMS]) == truth)
    if not common:
        return False
    old, new = (np.concatenate(of_frame) for of_frame in hits)
    differs = float(mcnemar((old & ~new).sum(), (new & ~old).sum())) < ALPHA
    return not (differs and abs(old.mean() - new.mean()) > EQUAL)


def _names(entries: Sequence[tuple[Part, pd.DataFrame]]) -> list[str]:
    """Return the words that follow the names of each part's strategy: as many as distinguish it from others."""
    parts = [part for part, _ in entries]
    count: Counter[str] = Counter()
    for part, frame in entries:
        count.update({part.strategy} if part.strategy else set(frame["strategy_name"].astype(str)))
    words = []
    for part in parts:
        same = [other for other in parts if other.strategy == part.strategy]
        if not part.strategy or count[part.strategy] == 1:
            words.append("")
            continue
        for n in range(1, len(part.origins) + 1):
            text = " ".join(part.origins[:n])
            if [" ".join(other.origins[:n]) for other in same].count(text) == 1:
                break
        words.append(plain(text, 100))
    return words


def _board_of(parts: Sequence[tuple[Part, pd.DataFrame]], names: Sequence[str]) -> Board:
    """Return the board of the records of several parts.

    Args:
        parts: the parts with their records.
        names: the words that follow the names of each part's strategy, see `_names`.
    """
    frames = _frames_of(parts, names)
    total = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0].reset_index(drop=True)
    total.attrs = _attributes([frame for _, frame in parts])

    values: dict[str, Mapping[str, str]] = {}
    third_party: set[str] = set()
    entries: list[str] = []
    environments: dict[str, Mapping[str, str]] = {}
    for (part, _), frame in zip(parts, frames, strict=True):
        labels = _labels_of(part, frame)
        values |= dict.fromkeys(labels, part.values)
        if part.strategy:
            third_party |= labels
        opened = Store(part.folder)
        entries += bibtex(opened, frame)
        environments |= manifests.environments(opened, set(frame["environment"].astype(str)))

    judged = judge(total)
    return Board(
        _with_values(judged, values),
        _with_values(judge(total, "task", judged), values),
        notes=notes_on(total, judged),
        bibtex=once(dict.fromkeys(entries)),
        environments=environments,
        papers=_papers(parts, names),
        third_party=frozenset(third_party),
    )


def _frames_of(parts: Sequence[tuple[Part, pd.DataFrame]], names: Sequence[str]) -> list[pd.DataFrame]:
    """Return the records that each part adds to those of the parts before it."""
    frames = []
    seen: set[str] = set()
    for (part, every), words in zip(parts, names, strict=True):
        frame = _records_of(part, every, words, seen)
        frames.append(frame)
        seen |= set(frame["cell_id"].astype(str))
    return frames


def _labels_of(part: Part, frame: pd.DataFrame) -> set[str]:
    """Return the labels of a part's strategy among the records that it adds; all labels of a part without one."""
    if not part.strategy:
        return set(frame["strategy"])
    is_own = frame["strategy_name"].astype(str) == part.strategy
    return set(frame["strategy"][is_own])


def _papers(parts: Sequence[tuple[Part, pd.DataFrame]], names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return authors and paper of each strategy whose name needs no words to distinguish it from others."""
    papers = {}
    for (part, _), words in zip(parts, names, strict=True):
        if part.strategy and part.values.get("paper") and not words:
            authors = plain(part.values.get("authors", ""), 300)
            papers[part.strategy] = authors, part.values["paper"]
    return papers


def _records_of(part: Part, frame: pd.DataFrame, words: str, seen: Collection[str]) -> pd.DataFrame:
    """Return the records that a part adds to a board.

    A submission adds those of its strategy, and of other strategies only the cells that no part before it has.

    Args:
        part: the part.
        frame: its records.
        words: follow the names of its strategy, if any.
        seen: the cells of the parts before it.
    """
    if part.strategy:
        is_own = frame["strategy_name"].astype(str) == part.strategy
        frame = frame[is_own | ~frame["cell_id"].astype(str).isin(seen)]
    is_own = frame["strategy_name"].astype(str) == part.strategy
    labels = frame["strategy"].astype(str)
    if words:
        labels = labels.where(~is_own, labels + f" by {words}")
    frame = frame.assign(strategy=labels)
    # Columns of categories would be lost where tables are joined.
    return frame.astype({name: object for name, kind in frame.dtypes.items() if kind == "category"})


def _attributes(frames: Sequence[pd.DataFrame]) -> dict[str, object]:
    """Return the attributes of several tables of records together."""
    declared: dict[str, object] = {}
    attributes: dict[str, object] = {}
    for frame in frames:
        for kind in frame.attrs.get(DECLARED, ()):
            declared.setdefault(kind["name"], kind)
        for name in (MAIN, SUCCESS):
            if frame.attrs.get(name):
                attributes.setdefault(name, frame.attrs[name])
    return attributes | {DECLARED: list(declared.values())}


def _with_values(judged: Leaderboard, values: Mapping[str, Mapping[str, str]]) -> Leaderboard:
    """Return a leaderboard whose rows say who reported them."""

    def added(rows: pd.DataFrame) -> pd.DataFrame:
        of_rows = [_values_of(str(name), values) for name in rows["strategy"]]
        columns = {}
        for column in COLUMNS:
            texts = [of_row.get(column.key) or None for of_row in of_rows]
            columns[column.key] = pd.Series(texts, rows.index, dtype=object)
        return rows.assign(**columns)

    def with_values(ranking: Ranking) -> Ranking:
        curves = ranking.curves
        if curves is not None:
            curves = curves._replace(rows=added(curves.rows.rename_axis(index=None)))
        return ranking._replace(rows=added(ranking.rows), every=added(ranking.every), curves=curves)

    used = {key for of_strategy in values.values() for key, value in of_strategy.items() if value}
    columns = [*judged.columns, *(column for column in COLUMNS if column.key in used)]
    return _mapped(judged, with_values)._replace(columns=columns)


def _mapped(judged: Leaderboard, change: Callable[[Ranking], Ranking]) -> Leaderboard:
    """Return a leaderboard with all of its rankings changed, also those of its sections."""
    rankings = [change(ranking) for ranking in judged.rankings]
    return judged._replace(rankings=rankings, sections=[change(ranking) for ranking in judged.sections])


def _values_of(name: str, values: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Return the values of a row: of the strategy with the row's name, or with the longest name that the row's extends.

    Names of curves may be extended by a schedule or by the form of the budget.
    """
    if name in values:
        return values[name]
    begins = [other for other in values if name.startswith((f"{other},", f"{other} "))]
    return values[max(begins, key=len)] if begins else {}


def _without_ranks(board: Board) -> Board:
    """Return a board whose rows have no ranks."""
    return board._replace(judged=_unranked(board.judged), by_task=_unranked(board.by_task))


def _unranked(judged: Leaderboard) -> Leaderboard:
    def without_ranks(ranking: Ranking) -> Ranking:
        every = ranking.every.copy()
        remove_ranks(every)
        curves = ranking.curves
        if curves is not None:
            every["kept_accuracy_rank"] = NOT_RANKED
            rows = curves.rows.copy()
            remove_ranks(rows)
            curves = curves._replace(rows=rows)
        return ranking._replace(every=every, curves=curves)

    return _mapped(judged, without_ranks)


def report(boards: Sequence[Shared], notes: Sequence[str], by_task: bool = False) -> Report:
    """Return the tables of several shared boards, with the notes of all."""
    tables: list[Table] = []
    rows: list[Row] = []
    columns: dict[str, Column] = {SUITE.key: SUITE}
    lines: dict[str, None] = {}
    for title, board, _ in boards:
        part = views.report(board.by_task if by_task else board.judged, whole=True)
        for table in part.tables:
            whole_title = ": ".join(filter(None, (title, table.title)))
            tables.append(table._replace(title=whole_title, columns=_beside_names(table.columns)))
        rows += [row | {"suite": title} for row in part.data.rows]
        columns |= {column.key: column for column in part.data.columns}
        lines |= dict.fromkeys(f"{title}: {note}" for note in board.notes)
    return Report(tables, Table(rows, list(columns.values())), [*notes, *lines])


def _beside_names(columns: Sequence[Column]) -> list[Column]:
    """Return columns with those of BESIDE_NAMES after the strategy's name."""
    beside = [column for key in BESIDE_NAMES for column in columns if column.key == key]
    others = [column for column in columns if column not in beside]
    places = [place for place, column in enumerate(others, 1) if column.key == "strategy"]
    place = places[0] if places else len(others)
    return [*others[:place], *beside, *others[place:]]


def one_board(boards: Sequence[Shared], notes: Sequence[str]) -> Board:
    """Return several shared boards as one, for the page: each comparison has the title of its board."""
    judged = [_titled(shared.board.judged, shared.title) for shared in boards]
    by_task = [_titled(shared.board.by_task, shared.title) for shared in boards]
    lines = [f"{title}: {note}" for title, board, _ in boards for note in board.notes]
    papers: dict[str, tuple[str, str]] = {}
    environments: dict[str, Mapping[str, str]] = {}
    entries: list[str] = []
    third_party: set[str] = set()
    for _, board, _ in boards:
        papers |= board.papers
        environments |= board.environments
        entries += board.bibtex
        third_party |= board.third_party
    return Board(
        _joined(judged),
        _joined(by_task),
        notes=[*notes, *dict.fromkeys(lines)],
        bibtex=once(dict.fromkeys(entries)),
        environments=environments,
        papers=papers,
        third_party=frozenset(third_party),
    )


def _titled(judged: Leaderboard, title: str) -> Leaderboard:
    def with_title(ranking: Ranking) -> Ranking:
        comparison = replace(ranking.comparison, board=title)
        return ranking._replace(parts={**ranking.parts, "accuracy": comparison})

    return _mapped(judged, with_title)


def _joined(leaderboards: Sequence[Leaderboard]) -> Leaderboard:
    """Return several leaderboards as one, with all columns that one of them has."""
    columns = {column.key: column for judged in leaderboards for column in judged.columns}
    rankings = [ranking for judged in leaderboards for ranking in judged.rankings]
    comparisons = [comparison for judged in leaderboards for comparison in judged.comparisons]
    sections = [ranking for judged in leaderboards for ranking in judged.sections]
    by_task = any(judged.by_task for judged in leaderboards)
    return Leaderboard(rankings, list(columns.values()), by_task, comparisons, sections)
