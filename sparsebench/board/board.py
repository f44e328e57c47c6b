"""A run's folder as a board: its records with what the folder says of them, and all that is shown of them."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote_plus

import pandas as pd

from sparsebench import files
from sparsebench.board.judge import Flats, Leaderboard, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.settings import (
    BADGE,
    DECLARED,
    HOW,
    MAIN,
    METRICS,
    ON_BACKGROUND,
    ORDER,
    SUCCESS,
    TRAINED,
    frame_of,
)
from sparsebench.errors import plain
from sparsebench.publish import MANIFEST
from sparsebench.records import manifests, store, table
from sparsebench.records.cell import canonical
from sparsebench.strategy.base import how_of_label
from sparsebench.testing import reports
from sparsebench.testing.reports import CHECKS, REMARK

OWN_PICTURE, PNG = "leaderboard", b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1_000_000
"""Of pictures in a board, together; larger ones stay beside it."""
ADDRESSES = (
    (re.compile(r"(https?://[\w./?=&%~+:-]+\w)"), ""),
    (re.compile(r"doi\s*=\s*[{\"]\s*(10\.[\w./()-]+[\w)])"), "https://doi.org/"),
    (re.compile(r"(?i:arxiv|eprint)\W{1,6}(?:preprint arXiv:)?(\d{4}\.\d{4,5})"), "https://arxiv.org/abs/"),
)
"""Of a publication, as citations have them, and what stands before them."""
SEARCH = "https://scholar.google.com/scholar?q="


@dataclass(frozen=True)
class Board:
    """What records come to; a pure function of what lies in their folder.

    Attributes:
        judged: the leaderboard over all tasks; `by_task` with a row a task and model as well.
        notes: what a reader must know besides.
        bibtex: entries of what is in it.
        environments: machine and libraries by hash; `suites` lines that say what was asked for.
        pictures: PNG files by what they show, such as which tokens were kept.
        papers: what strategies cite and its address, by their names without parameters; a search where none is known.
    """

    judged: Leaderboard
    by_task: Leaderboard
    notes: list[str] = field(default_factory=list)
    bibtex: list[str] = field(default_factory=list)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    suites: list[str] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    papers: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def read(out: Path, metrics: Container[str] | None = METRICS) -> pd.DataFrame:
    """Return the records of a run's folder as a table, with badges, and whether and how each strategy is trained.

    It has the plain columns of `table`, those of outcomes, and the metrics: `metrics` or all, and those that tasks
    declare, of which the table's attributes say what they are, with what suites say of their board. Predictions are
    read as they are looked at. Pictures and weights have the names that users have for them.

    Raises:
        UserError: as `store.rows`.
    """
    import pyarrow as pa

    kinds = manifests.metrics(out)
    declared = {kind.name for kind in kinds}

    def wanted(name: str) -> bool:
        if not table.is_metric(name):
            return name not in (*table.PARTS, table.RANKS, "memory", table.CHECKSUM)
        return metrics is None or name in metrics or name in declared or ON_BACKGROUND.fullmatch(name) is not None

    rows = store.rows(out, wanted).drop_columns([table.CHECKSUM])
    rows = rows.sort_by([(name, "ascending") for name in ORDER])
    kept = {pa.string(), pa.binary()}
    records = rows.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if kind in kept else None)
    records = describe(_with_names(records, manifests.file_names(out)), out)
    records.attrs[DECLARED] = kinds
    suites = sorted(manifests.suites(out), key=lambda suite: len(suite.settings), reverse=True)
    records.attrs[MAIN] = tuple(dict.fromkeys(suite.main_task for suite in suites if suite.main_task))
    if success := next((suite.sample_complexity for suite in suites if suite.sample_complexity), ""):
        records.attrs[SUCCESS] = success
    return records


def _with_names(records: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return records with what users call their folders of pictures and files of weights, in place of hashes.

    A name that settings have for something else, such as shipped pictures, is followed by the hash.
    """
    settings, networks = (records[name].astype("category") for name in ("setting", "network"))
    text = "\n".join(settings.cat.categories)
    names = {name: f"{file} ({name})" if canonical(file) in text else file for name, file in names.items()}
    in_json = {canonical(name): canonical(file) for name, file in names.items()}
    pattern = re.compile("|".join(map(re.escape, in_json)) or "(?!)")
    return records.assign(
        setting=settings.cat.rename_categories(lambda one: pattern.sub(lambda found: in_json[found[0]], one)),
        network=networks.cat.rename_categories(lambda whole: " ".join(names.get(one, one) for one in whole.split(" "))),
    )


def describe(records: pd.DataFrame, out: Path) -> pd.DataFrame:
    """Return records with what a run's folder says of their strategies: badge, remarks, whether trained, and how."""
    every, known = reports.read(out), manifests.strategies(out)
    grouped = records.groupby(["strategy", "revision"], observed=True, sort=False)
    said, (submitted, badge) = [], _badge_of(out)
    for label, revision in grouped.groups:
        name = label.partition("(")[0]
        about = known.get((name, revision))
        trained = "" if about is None else "yes" if about.trained else "no"
        checked = reports.badge_of(every, label, revision)
        how = "" if about is None else how_of_label(about.how, label)
        said.append((*checked, trained, badge if name == submitted else "", plain(how)))
    number = grouped.ngroup()
    named = zip((CHECKS, REMARK, TRAINED, BADGE, HOW), zip(*said, strict=True), strict=True)
    return records.assign(**{name: pd.Categorical(values).take(number) for name, values in named})


def _badge_of(out: Path) -> tuple[str, str]:
    """Return whose submission a folder is and its badge, as far as its own records bear it; "" of any other folder."""
    if not os.path.lexists(out / MANIFEST):
        return "", ""
    from sparsebench.publish.verify import verify

    verdict = verify(out)
    return verdict.strategy, verdict.badge


def gather(folder: Path) -> Board:
    """Return the board of a run's folder, from what lies in it alone.

    Raises:
        UserError: the folder holds no records, or some by a later sparsebench.
    """
    return board_of(read(folder), folder)


def board_of(records: Flats, folder: Path) -> Board:
    """Return the board of some flat records of a run's folder, with what lies beside them."""
    frame = frame_of(records)
    judged, by_task = judge(frame), judge(frame, "task")
    asked = (suite for suite in manifests.suites(folder) if suite.name != manifests.OWN)
    suites = (plain(f"{suite.name}, version {suite.version}") for suite in asked)
    return Board(
        judged,
        by_task,
        notes=notes_on(frame, judged, folder),
        bibtex=bibtex(folder, frame),
        papers={one.name: found for one in _described(folder, frame) if (found := _paper(one))},
        environments=manifests.environments(folder, set(frame["environment"])),
        suites=list(dict.fromkeys(suites)),  # one that was asked for with other words is there again
        pictures=_pictures(folder),
    )


def bibtex(folder: Path, frame: pd.DataFrame) -> list[str]:
    """Return the entries of what the strategies of a board cite."""
    entries = (one.bibtex.strip().splitlines() for one in _described(folder, frame))
    return sorted({"\n".join(map(plain, lines)) for lines in entries} - {""})


def _described(folder: Path, frame: pd.DataFrame) -> list[manifests.Described]:
    """Return what is known of the strategies of a board."""
    known = manifests.strategies(folder)
    pairs = frame[["strategy", "revision"]].drop_duplicates().itertuples(index=False)
    sources = sorted({(label.partition("(")[0], revision) for label, revision in pairs})
    return [known[key] for key in sources if key in known]


def _paper(strategy: manifests.Described) -> tuple[str, str] | None:
    """Return what a strategy cites, and the first address in that: of the web, a DOI, or arXiv's; else of a search."""
    citation = plain(strategy.citation, 300)
    for pattern, begin in ADDRESSES:
        if (found := pattern.search(f"{strategy.bibtex} {strategy.citation}")) is not None:
            return citation, f"{begin}{found[1]}"
    return (citation, f"{SEARCH}{quote_plus(citation)}") if citation else None


def _pictures(folder: Path) -> dict[str, bytes]:
    """Return the PNG files of a folder by name, without the board's own, as many as there is room for."""
    pictures, room = {}, MOST_BYTES
    for path in files.files_in(folder.resolve(), ".png"):
        content = None if path.name.startswith(OWN_PICTURE) else files.content_or_none(path, room)
        if content is not None and content.startswith(PNG):
            pictures[plain(path.stem)] = content
            room -= len(content)
    return pictures
