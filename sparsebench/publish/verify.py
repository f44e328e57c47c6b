"""A submission's badge: from its files alone, without running its code, whether it is whole and consistent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparsebench.budget import FULL
from sparsebench.errors import UserError
from sparsebench.planning.expand import unanswered
from sparsebench.planning.suite import load, names
from sparsebench.plugin.registry import Registry
from sparsebench.publish import folder as folders
from sparsebench.publish.consistent import called, differences
from sparsebench.publish.folder import MANIFEST, Manifest, Unfit
from sparsebench.records import environment, manifests, store
from sparsebench.records.cell import Cell
from sparsebench.records.manifests import Asked, Described, setting_of
from sparsebench.records.record import Record
from sparsebench.text import few, plain

Badge = Literal["rejected", "reported", "replayed"]
"""In rising order; what is rejected has none."""
SAID: dict[Badge, str] = {
    "rejected": "not whole, or not consistent",
    "reported": "whole and consistent; nobody has run it again",
    "replayed": "whole and consistent; cells drawn by chance, run again here, agree",
}
DIFFERS = "whole and consistent; cells that were run again here do not agree"
SHOWN = 5
"""Reasons that a verdict has."""


@dataclass
class Verdict:
    """What was found of a submission.

    Attributes:
        badge: see `SAID`.
        wrong: whether something contradicts something else, in the submission or in its replay.
        why: what does.
        strategy, version, suite, records: what it is, as far as it can be read; "" for cells of no suite.
        notes: what else there is to know: a suite that is not the board's, which cells were run again.
    """

    folder: str
    badge: Badge = "rejected"
    wrong: bool = False
    why: list[str] = field(default_factory=list)
    strategy: str = ""
    version: str = ""
    suite: str = ""
    records: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """What the badge means."""
        return DIFFERS if self.wrong and self.badge == "reported" else SAID[self.badge]

    def contradicted(self, why: Sequence[str]) -> None:
        """Keep what contradicts something else."""
        more = [f"and {len(why) - SHOWN} more"] if len(why) > SHOWN else []
        self.why, self.wrong = [*why[:SHOWN], *more], True


def verify(folder: Path, board: Sequence[Asked] | None = None, *, placed: bool = False) -> Verdict:
    """Return what can be told of one submission from its files alone; whatever they are, there is a verdict.

    torch is imported only where a cell's model is one of timm's.

    Args:
        folder: the submission's.
        board: the suites that a board answers, with which the submission's is to be compared.
        placed: whether the folder must be called <strategy>/<version>, as those that are published are.
    """
    verdict = Verdict(plain(folder, 500))
    try:
        manifest = folders.manifest_of(folder)
        verdict.strategy, verdict.version = plain(manifest.strategy), plain(manifest.version)
        place = f"{manifest.strategy}/{manifest.version}"
        if placed and place != "/".join(folder.absolute().parts[-2:]):
            raise Unfit(f"its folder is not called {plain(place)}, which it is")
        suite = _suite(folder, manifest)
        verdict.suite = "" if suite.name == manifests.OWN else plain(f"{suite.name} {suite.version}")
        if board is not None and (other := _against(suite, board)):
            verdict.notes.append(other)
        wrong = list(_wrong(folder, manifest, suite, verdict))
    except OSError as error:
        wrong = [f"it cannot be read: {error.strerror}"]
    except (ValueError, UserError) as error:
        wrong = [plain(error)]
    if wrong:
        verdict.contradicted(wrong)
    else:
        verdict.badge = "reported"
    return verdict


def verify_each(folders_: Iterable[Path], board: Path | None = None) -> Iterator[Verdict]:
    """Yield the verdict on each submission; see `verify`. `board` is a run's folder, whose suites are compared."""
    asked = None if board is None else manifests.suites(board)
    for folder in folders_:
        yield verify(folder, asked, placed=True)


def submissions_in(path: Path) -> list[Path]:
    """Return the submissions below a path, sorted: itself, or the folders two deep, or one with a manifest.

    Raises:
        UserError: there is no such folder, or no submission in it.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder")

    def below(path: Path, depth: int) -> Iterator[Path]:
        if (path / MANIFEST).is_file() or not depth:
            yield path
        else:
            for each in path.iterdir():
                if each.is_dir():
                    yield from below(each, depth - 1)

    try:
        found = sorted(below(path, 2))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UserError(f"no submissions in {path}", next_step="they lie in <strategy>/<version>/")
    return found


def unanswered_of(suite: Asked, cells: Sequence[Cell]) -> list[str]:
    """Return what a suite asks and cells of one strategy do not answer; nothing where the suite is not known here."""
    if suite.name not in names() or (known := load(suite.name)).version != suite.version:
        return []
    unbudgeted = all(cell.budget == FULL for cell in cells)
    return unanswered(known, cells, Registry(shipped_only=True), any_budget=unbudgeted)


def _suite(folder: Path, manifest: Manifest) -> Asked:
    """Return the suite that a submission answers."""
    said = manifest.suite
    for suite in manifests.suites(folder):
        if (suite.name, suite.version, suite.sha256) == (said.name, said.version, said.sha256):
            return suite
    raise Unfit(f"its suite is not the one that {MANIFEST} names")


def _wrong(folder: Path, manifest: Manifest, suite: Asked, verdict: Verdict) -> Iterator[str]:
    """Yield what is not whole or not consistent; the verdict then says how many records there are."""
    described = manifests.strategies(folder).get((manifest.strategy, manifest.plugin.revision))
    if described is None:
        raise Unfit("it does not say what its strategy is, or not of that revision")
    machines = {name.removesuffix(".json") for name in store.beside(folder, environment.FOLDER)} | {""}
    asked, seen, starts, needed = set(suite.settings), set[str](), set[str](), set[str]()
    cells: list[Cell] = []
    for record in folders.read_records(folder):
        verdict.records += 1
        cell, twice = record.cell, record.cell_id in seen
        odd = "is there twice" if twice else "" if record.environment in machines else "has a machine without a name"
        if odd := odd or _other_strategy(record, manifest, described):
            yield f"{called(record)} {odd}"
        seen.add(record.cell_id)
        needed |= {init.id for init in cell.inits}
        if setting_of(cell) not in asked:
            starts.add(record.cell_id)
        elif cell.strategy.name == manifest.strategy:
            cells.append(cell)
        yield from (f"{called(record)}: {text}" for text in differences(record))
    if strange := sorted(starts - needed):
        yield f"cell {strange[0]} is not of the suite, and no cell starts from it"
    if left := asked - set(map(setting_of, cells)):
        yield f"incomplete: it lacks {len(left)} of the {len(asked)} settings of {_title(suite)}"
    elif lacks := unanswered_of(suite, cells):
        yield f"incomplete: of {_title(suite)} it lacks {few(lacks, 1)}"


def _other_strategy(record: Record, manifest: Manifest, described: Described) -> str:
    """Return how a record is of another strategy than a submission may have, or "" where it is not."""
    name, own = record.cell.strategy.name, record.cell.strategy.name == manifest.strategy
    if own and (record.origin.identity, record.kind) != (manifest.plugin.identity, described.kind):
        return "is of another revision, or of another kind, than its strategy"
    if not own and record.kind == "deployable":
        return "is of another strategy than is submitted"
    labelled = record.label == name or record.label.startswith(f"{name}(")
    return "" if name.isidentifier() and labelled else f"has strategy '{plain(name, 60)}'"


def _title(suite: Asked) -> str:
    return "cells of its own" if suite.name == manifests.OWN else f"suite {plain(suite.name, 60)} {suite.version}"


def _against(suite: Asked, board: Sequence[Asked]) -> str | None:
    """Return why a submission's rows are not to be mixed with those of a board that answers some suites, or None."""
    if any(one.sha256 == suite.sha256 for one in board):
        return None
    answered = f"{_title(suite)} with {len(suite.settings)} settings"
    others = ", ".join(f"{_title(one)} with {len(one.settings)}" for one in board)
    return f"not of the board: it answers {answered}, and the board {others or 'does not say what'}"
