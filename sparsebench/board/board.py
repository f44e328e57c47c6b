"""The board of a run's folder: its leaderboards, notes, citations and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from sparsebench import files
from sparsebench.board.citations import of_records, once
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.papers import address_of
from sparsebench.board.reading import NO_BADGES, Flats, frame_of, read
from sparsebench.errors import plain
from sparsebench.records import manifests
from sparsebench.records.record import SHIPPED
from sparsebench.records.store import Store

OWN_PICTURE, PNG = "leaderboard", b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1_000_000
"""Limit on the total size of the pictures in a board. Pictures beyond it stay files of the folder."""


class Board(NamedTuple):
    """A board; a pure function of the files in the run's folder.

    Attributes:
        judged: the leaderboard over all tasks.
        by_task: the leaderboard with separate rows for each task and model.
        notes: lines for the reader, see `notes.notes_on`.
        bibtex: entries of sparsebench, its data sets and weights, and the works that its strategies cite.
        environments: machine and libraries, by hash.
        suites: names and versions of the suites that were run.
        pictures: PNG files by their subject, such as the tokens that were kept.
        papers: citation and address, by strategy name without parameters; the address is a search if none is known.
        third_party: the strategies, with parameters, that do not come with sparsebench.
    """

    judged: Leaderboard
    by_task: Leaderboard
    notes: Sequence[str] = ()
    bibtex: Sequence[str] = ()
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    suites: Sequence[str] = ()
    pictures: Mapping[str, bytes] = MappingProxyType({})
    papers: Mapping[str, tuple[str, str]] = MappingProxyType({})
    third_party: frozenset[str] = frozenset()


def gather(folder: Path, badges: Mapping[str, str] = NO_BADGES) -> Board:
    """Return the board of a run's folder.

    Args:
        folder: the folder.
        badges: badges of submitted strategies, by name.

    Raises:
        UserError: the folder has no records, or has records of a later sparsebench.
    """
    opened = Store(folder)
    return board_of(read(opened, badges=badges), opened)


def board_of(records: Flats, folder: Path | Store) -> Board:
    """Return the board of flat records of a run's folder, with the folder's manifests and pictures."""
    folder = Store.open(folder)
    frame = frame_of(records)
    judged = judge(frame)
    suites_asked = (suite for suite in manifests.suites(folder) if suite.name != manifests.OWN)
    suites = (plain(f"{suite.name}, version {suite.version}") for suite in suites_asked)
    papers = {}
    for strategy in _strategies_of(folder, frame):
        if address := address_of(strategy.bibtex, strategy.citation):
            papers[strategy.name] = plain(strategy.citation, 300), address
    return Board(
        judged,
        judge(frame, "task", judged),
        notes=notes_on(frame, judged, folder),
        bibtex=bibtex(folder, frame),
        environments=manifests.environments(folder, set(frame["environment"])),
        suites=list(dict.fromkeys(suites)),  # a suite that was run with several sets of options is listed once
        pictures=_pictures_in(folder),
        papers=papers,
        third_party=frozenset(frame.loc[frame["distribution"].astype(str) != SHIPPED, "strategy"].astype(str)),
    )


def _pictures_in(folder: Store) -> dict[str, bytes]:
    """Return the PNG files of a folder by name, as far as there is room; those of the board itself are left out."""
    pictures = {}
    room = MOST_BYTES
    for path in files.files_in(folder.path.resolve(), ".png"):
        if path.name.startswith(OWN_PICTURE):
            continue
        content = files.content_or_none(path, room)
        if content is not None and content.startswith(PNG):
            pictures[plain(path.stem)] = content
            room -= len(content)
    return pictures


def bibtex(folder: Store, frame: pd.DataFrame) -> list[str]:
    """Return BibTeX entries: of sparsebench, the data and the weights of a board, and of its strategies."""
    entries = (strategy.bibtex.strip().splitlines() for strategy in _strategies_of(folder, frame))
    of_strategies = sorted({"\n".join(map(plain, lines)) for lines in entries} - {""})
    return once([*of_records(frame), *of_strategies])


def _strategies_of(folder: Store, frame: pd.DataFrame) -> list[manifests.StrategyEntry]:
    """Return the manifest entries of the strategies of a board."""
    strategies = manifests.strategies(folder)
    used = frame[["strategy_name", "revision"]].astype(str).drop_duplicates()
    keys = sorted(used.itertuples(index=False, name=None))
    return [strategies[key] for key in keys if key in strategies]
