"""A submission's badge: how far its numbers were followed, from its records alone and without running its code."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from pydantic import RootModel

from sparsebench.errors import UserError
from sparsebench.measure.scores import Items
from sparsebench.models.base import Model
from sparsebench.publish import folder as folders
from sparsebench.publish import recount, rescore, shipped
from sparsebench.publish.folder import MANIFEST, Manifest, Unfit, plain
from sparsebench.publish.lines import record_of
from sparsebench.publish.parts import shipped_model, shipped_task, truths, unanswered_of
from sparsebench.publish.redraw import Redraw
from sparsebench.records import environment, manifests
from sparsebench.records.cell import Cell
from sparsebench.records.manifests import Asked, Described, LeftOut, setting_of
from sparsebench.records.record import Record
from sparsebench.tasks.base import Task

Badge = Literal["rejected", "reported", "rescored", "recounted", "replayed (elsewhere)", "replayed"]
BADGES: tuple[Badge, ...] = get_args(Badge)
"""In rising order; what is rejected has none."""
DEPTH, MOST_FOLDERS = 2, 10_000
"""How far below PATH submissions lie, as <strategy>/<version>, and how many a folder may hold."""
SHOWN, MOST_NAMES = 5, 100
"""Reasons of one kind that a verdict has, and metrics that it names."""
UNRUN = "give --replay N to run N of its cells again here"


class Machine(RootModel[dict[str, str]]):
    """An environment, as `environment.describe` gives it."""


@dataclass
class Findings:
    """What stands between a submission and one badge: what contradicts itself, and what cannot be told."""

    wrong: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, text: str, *, wrong: bool = True) -> None:
        """Add a reason, unless there are many of its kind or it is there."""
        texts = self.wrong if wrong else self.open
        if text in texts:
            return
        if len(texts) < SHOWN:
            texts.append(text)
        else:
            self.more += 1

    @property
    def why(self) -> list[str]:
        """All reasons, what is wrong first."""
        return [*self.wrong, *self.open, *([f"and {self.more} more"] if self.more else [])]


@dataclass
class Verdict:
    """What was found of a submission.

    Attributes:
        badge: see `BADGES`.
        why: why it has not the next badge.
        wrong: whether something in it contradicts something else; otherwise there was only nothing to tell it by.
        strategy, version, suite, records: what it is, as far as it can be read; "" for cells of no suite.
        as_reported: metrics that nothing here was made again of.
        notes: what else there is to know: settings that are missing, a suite that is not the board's.
        points: within how many points the accuracies of drawn cells agree that claim another machine.
    """

    folder: str
    badge: Badge = "rejected"
    why: list[str] = field(default_factory=list)
    wrong: bool = False
    strategy: str = ""
    version: str = ""
    suite: str = ""
    records: int = 0
    as_reported: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    points: float | None = None

    def grant(self, badge: Badge, findings: Findings) -> None:
        """Give a badge, if it has the one before, unless there are findings against it, which are why it is not given.

        What is wrong is told even if a lower badge is not given for want of something to tell it by.
        """
        if not self.why and not findings.why:
            self.badge = badge
        else:
            self.why += findings.wrong if self.why else findings.why
        self.wrong = self.wrong or bool(findings.wrong)


def badge_of(folder: Path) -> Badge:
    """Return the badge of one submission: rejected, reported, rescored or recounted."""
    return verify(folder).badge


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
        if placed and (wrong := _other_place(folder, manifest)):
            raise Unfit(wrong)
        examined = _Examined(folder, manifest)
    except (Unfit, OSError, ValueError) as error:
        verdict.why, verdict.wrong = [_unreadable(error)], True
        return verdict
    verdict.strategy, verdict.version = plain(manifest.strategy), plain(manifest.version)
    if manifest.suite.name != manifests.OWN:
        verdict.suite = plain(f"{manifest.suite.name} {manifest.suite.version}")
    examined.read()
    verdict.records, verdict.notes = examined.records, examined.notes
    if board is not None and (other := _against(examined.suite, board)):
        verdict.notes.append(other)
    verdict.as_reported = sorted(examined.as_reported)[:MOST_NAMES]
    verdict.grant("reported", examined.reported)
    verdict.grant("rescored", examined.rescored)
    verdict.grant("recounted", examined.recounted)
    verdict.why = verdict.why or [UNRUN]
    return verdict


def verify_each(folders_: Iterable[Path], board: Path | None = None) -> Iterator[Verdict]:
    """Yield the verdict on each submission; see `verify`. `board` is a run's folder, whose suites are compared."""
    asked = None if board is None else manifests.suites(board)
    for folder in folders_:
        yield verify(folder, asked, placed=True)


def submissions_in(path: Path) -> list[Path]:
    """Return the submissions below a path, sorted: itself, or the folders without folders of their own below it.

    Links are not followed: one in the place of a submission is one, which will be rejected.

    Raises:
        UserError: there is no such folder, or no submission in it.
    """
    if path.is_symlink():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is no folder")
    try:
        folders = sorted(_below(path, DEPTH))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not folders:
        raise UserError(f"no submissions in {path}", next_step="they lie in <strategy>/<version>/")
    return folders


def _below(path: Path, depth: int) -> Iterator[Path]:
    with os.scandir(path) as entries:
        inside = {entry.name: entry for entry in islice(entries, MOST_FOLDERS + 1)}
    if len(inside) > MOST_FOLDERS:
        raise UserError(f"{path} holds more than {MOST_FOLDERS} files and folders")
    if MANIFEST in inside or not depth:
        yield path
        return
    for name, entry in inside.items():
        if entry.is_symlink():
            yield path / name
        elif entry.is_dir():
            yield from _below(path / name, depth - 1)


def _other_place(folder: Path, manifest: Manifest) -> str | None:
    """Return how a folder is not called as what it holds, or None."""
    *_, strategy, version = folder.absolute().parts[-2:]
    if (strategy, version) == (manifest.strategy, manifest.version):
        return None
    return (
        f"its folder is called {plain(strategy, 60)}/{plain(version, 60)}, and it is "
        f"{plain(manifest.strategy, 60)}/{plain(manifest.version, 100)}"
    )


def _unreadable(error: Exception) -> str:
    return plain(f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else error)


class _Examined:
    """A submission on its way through its records, of which one is held at a time."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.reported, self.rescored, self.recounted = Findings(), Findings(), Findings()
        self.records, self.as_reported, self.notes = 0, set[str](), list[str]()
        self.suite = self._suite()
        self.asked = set(self.suite.settings)
        known = folders.beside(folder, manifest, manifests.STRATEGIES, Described)
        self.described = {(one.name, one.revision): one for one in known}
        source = manifest.strategy, manifest.plugin.revision
        if source not in self.described:
            raise Unfit("it does not say what its strategy is, or not of that revision")
        self.kind = self.described[source].kind
        folders.beside(folder, manifest, environment.FOLDER, Machine)
        folders.beside(folder, manifest, manifests.PICTURES, LeftOut)
        self._networks, self._redraw = recount.Networks(), Redraw()
        self._truths: dict[tuple[str, str], tuple[str, str]] = {}
        self._settings: dict[str, tuple[bool, str]] = {}  # whether the strategy has it, and what it is called
        self._starts, self._needed, self._good = set[str](), set[str](), 0
        self._cells: list[Cell] = []  # the strategy's

    def _suite(self) -> Asked:
        """Return the suite that it answers."""
        suites, said = folders.beside(self.folder, self.manifest, manifests.SUITES, Asked), self.manifest.suite
        if [(one.name, one.version, one.sha256) for one in suites] != [(said.name, said.version, said.sha256)]:
            raise Unfit(f"its suite is not the one that {MANIFEST} names")
        return suites[0]

    def read(self) -> None:
        """Examine every record."""
        last = ""
        try:
            for number, line in enumerate(folders.lines(self.folder), 1):
                try:
                    record, _ = record_of(line)
                    if record.cell_id <= last:
                        raise Unfit("its cell is there before" if record.cell_id == last else "it is not in order")
                    last, self.records = record.cell_id, self.records + 1
                    self._belongs(record)
                except Unfit as error:
                    self.reported.add(f"record {number}: {error}")
                    continue
                if record.status == "ok":
                    self._examine(record)
        except (Unfit, OSError) as error:
            self.reported.add(_unreadable(error))
        self._conclude()

    def _belongs(self, record: Record) -> None:
        """Raise Unfit for a record that a submission of this strategy for this suite has not."""
        published, setting = record.cell.strategy.name == self.manifest.strategy, setting_of(record.cell)
        if published and (record.origin.identity != self.manifest.plugin.identity or record.kind != self.kind):
            raise Unfit("it is of another revision, or of another kind, than its strategy")
        if not published and record.kind == "deployable":
            raise Unfit(f"it is of another strategy, '{plain(record.cell.strategy.name, 60)}'")
        if odd := shipped.other_kind(record):
            raise Unfit(odd)
        if record.environment and f"{environment.FOLDER}/{record.environment}.json" not in self.manifest.files:
            raise Unfit("its machine is not described")
        if setting in self.asked:
            cell = record.cell
            name = f"{plain(cell.task.name, 40)} with {cell.n_train} samples, repetition {cell.repetition}"
            self._settings[setting] = published or self._settings.get(setting, (False, ""))[0], name
            self._good += published and record.status == "ok"
            self._cells += [cell] if published else []
        else:
            self._starts.add(record.cell_id)
        if record.cell.init is not None:
            self._needed.add(record.cell.init.id)

    def _examine(self, record: Record) -> None:
        """Make again what can be made again of a record that is ok."""
        try:
            items = rescore.items_of(record)
            assert items is not None
            task, model = shipped_task(record.cell.task), shipped_model(record.cell.model)
        except (Unfit, UserError) as error:
            self.rescored.add(f"{_cell(record)}: {plain(error)}")
            return
        if odd := shipped.other_revision(record.cell.strategy.name, record.origin):
            self.recounted.add(odd, wrong=False)
        scores, macs = self._scores(record, items, task), self._macs(record, items, task, model)
        for findings, texts in ((self.rescored, scores), (self.recounted, macs)):
            try:
                for text in texts:
                    findings.add(f"{_cell(record)}: {text}")
            except (Unfit, UserError) as error:
                findings.add(plain(error), wrong=isinstance(error, Unfit))
            except (ArithmeticError, ValueError, MemoryError) as error:  # numbers that are too large to count with
                findings.add(f"{_cell(record)}: {plain(error)}")
        planned = {"macs_ratio_planned"} if record.cell.where == "train" or record.cell.budget.macs == 1.0 else set()
        made = set(recount.COUNTED) - {"macs_ratio_planned"} | planned
        reported = {plain(name.partition(":")[0], 60) for name in record.metrics if not rescore.is_decided(name)} - made
        if len(self.as_reported) < MOST_NAMES:
            self.as_reported |= reported

    def _scores(self, record: Record, items: Items, task: Task | None) -> Iterator[str]:
        asked = getattr(task, "test", 0)
        if asked and len(items.labels) != asked:
            yield f"it has {len(items.labels)} test items, and its task {asked}"
        yield from rescore.differences(record, items, task)
        for truth, what in truths(record, items):
            first, cell_id = self._truths.setdefault(truth, (what, record.cell_id))
            if first != what:
                yield f"its {truth[0]} are others than those of cell {cell_id}"
        if task is not None:
            yield from self._redraw.differences(record, items, task)
        if not rescore.has_losses(record):
            raise UserError("records of schema 1 have neither ranks nor losses, and are not wholly rescored")
        if task is None:
            raise UserError(f"task '{plain(record.cell.task.name, 60)}' does not come with sparsebench")

    def _macs(self, record: Record, items: Items, task: Task | None, model: Model | None) -> Iterator[str]:
        if task is None or model is None:
            strange = record.cell.task if task is None else record.cell.model
            raise UserError(f"'{plain(strange.name, 60)}' does not come with sparsebench")
        yield from recount.differences(record, items.labels, task, model, self._networks)

    def _conclude(self) -> None:
        """Look at all records together."""
        if strange := sorted(self._starts - self._needed):
            self.reported.add(f"cell {strange[0]} is not of the suite, and no cell starts from it")
        missing = self.asked - {setting for setting, (published, _) in self._settings.items() if published}
        if missing == self.asked:
            self.reported.add("it has no record of its strategy in its suite")
        elif not self._good:
            self.rescored.add("no cell of its strategy has a result", wrong=False)
        if lacks := unanswered_of(self.suite, self._cells):
            cells = "a cell" if len(lacks) == 1 else f"{len(lacks)} cells"
            self.reported.add(f"it is none for {_title(self.suite)}, of which it lacks {cells}, such as {lacks[0]}")
        if missing:
            of = f"{len(self.asked)} settings of {_title(self.suite)}"
            named = sorted(self._settings[setting][1] for setting in missing & set(self._settings))[:SHOWN]
            such = ", such as " + "; ".join(named) if named else ""
            self.notes.append(f"incomplete: it lacks {len(missing)} of the {of}{such}")
        if left := sorted(self._redraw.left):
            self.notes.append(f"test items are as reported, and were not drawn again: those of {', '.join(left)}")


def _cell(record: Record) -> str:
    return f"cell {record.cell_id} ({plain(record.label, 60)} on {plain(record.cell.task.name, 40)})"


def _title(suite: Asked) -> str:
    return "cells of its own" if suite.name == manifests.OWN else f"suite {plain(suite.name, 60)} {suite.version}"


def _against(suite: Asked, board: Sequence[Asked]) -> str | None:
    """Return why a submission's rows are not to be mixed with those of a board that answers some suites, or None."""
    if any(one.sha256 == suite.sha256 for one in board):
        return None
    answered = f"{_title(suite)} with {len(suite.settings)} settings"
    others = ", ".join(f"{_title(one)} with {len(one.settings)}" for one in board)
    return f"not of the board: it answers {answered}, and the board {others or 'does not say what'}"
