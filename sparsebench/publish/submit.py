"""From a run's folder to a submission: one strategy's records, for a suite or not, with the baselines beside it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sparsebench.collector import without_collector
from sparsebench.errors import UserError, unknown
from sparsebench.publish.folder import MANIFEST, RECORDS, Answered, Manifest, version_of
from sparsebench.publish.parts import unanswered_of
from sparsebench.publish.verify import Verdict, verify
from sparsebench.records import environment, files, manifests, store
from sparsebench.records.cell import Cell, canonical, digest
from sparsebench.records.files import content_of
from sparsebench.records.manifests import Asked, setting_of
from sparsebench.records.merge import Place, lines
from sparsebench.records.origin import Origin
from sparsebench.records.record import Record
from sparsebench.strategy import Kind

TO = "leaderboard/submissions"
AGAIN = "give the command of the run again: what is there is not run again, and the folder then says it"
_NAME = re.compile(r"\w[\w.-]{0,199}")


class _Known(NamedTuple):
    """What decides whether a record is published."""

    cell_id: str
    cell: Cell
    strategy: str
    kind: str
    origin: Origin
    setting: str
    start: str
    machine: str
    place: Place


@dataclass(frozen=True)
class Submission:
    """What was written, and what `verify` says of it."""

    folder: Path
    manifest: Manifest
    verdict: Verdict


def submit(out: Path, to: Path, strategy: str | None = None) -> Submission:
    """Write TO/<strategy>/<version>/ from a run's folder. The same records always give the same bytes.

    It has every record of the strategy in the suite that the folder answers, or else in all that was run, failures
    among them; those of the baselines and oracles in the same settings, since differences to them are paired by seed
    and only hold for records of one run; and those of the cells that others start from. No other deployable strategy's.

    Raises:
        UserError: the folder has no such strategy, or several; the records are not all of one revision; they lack
            settings of the suite; what would be published contradicts itself; or it is there already.
    """
    with without_collector():
        known = list(store.newest((stored.claim, _entry(stored)) for stored in store.scan_all(out, Record)).values())
    if not known:
        raise UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")
    name = _strategy(known, strategy)
    entries = [one for one in known if one.strategy == name]
    origin = _origin(entries, name)
    if (name, origin.revision) not in manifests.strategies(out):
        raise UserError(f"{out} does not say what strategy '{name}' is", next_step=AGAIN)
    suite = _suite(manifests.suites(out), entries, out)
    chosen = _choose(known, name, suite)
    answered = Answered(name=suite.name, version=suite.version, sha256=suite.sha256)
    version = version_of(answered, origin)
    if odd := [part for part in (name, version) if not _NAME.fullmatch(part)]:
        raise UserError(
            "the name of a folder of the submission", got=repr(odd[0]), allowed="letters, digits, _, - and ."
        )
    folder = to / name / version
    if folder.is_symlink() or folder.exists():
        raise UserError(f"{folder} is there and is not written over", next_step="remove it, or give another --to")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        _write(part, out, chosen, (name, origin.revision), suite)
        hashes = {path.relative_to(part).as_posix(): files.content_hash(path) for path in part.rglob("*.json*")}
        manifest = Manifest(strategy=name, version=folder.name, plugin=origin, suite=answered, files=hashes)
        files.write_whole(part / MANIFEST, (canonical(manifest.model_dump(mode="json")) + "\n").encode())
        verdict = verify(part)
        if verdict.wrong:
            raise UserError(f"{out} would not be verified: {'; '.join(verdict.why)}")
        verdict.folder = str(folder)
        os.replace(part, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Submission(folder, manifest, verdict)


def _entry(stored: store.Found[Record]) -> _Known:
    record = stored.item
    cell = record.cell
    start = "" if cell.init is None else cell.init.id
    place = Place(stored.path, stored.offset, stored.length)
    return _Known(
        record.cell_id, cell, cell.strategy.name, record.kind, record.origin, setting_of(cell), start,
        record.environment, place,
    )  # fmt: skip


def _strategy(known: Iterable[_Known], asked: str | None) -> str:
    """Return the name of the strategy to publish: as asked, or the only one that may be deployed."""
    kinds: dict[str, Kind | str] = {one.strategy: one.kind for one in known}
    if asked is not None:
        if asked not in kinds:
            raise unknown("strategy in these records", asked, kinds)
        return asked
    names = sorted(name for name, kind in kinds.items() if kind == "deployable")
    if len(names) != 1:
        contents = f"strategies {', '.join(names)}" if names else "no strategy but baselines and oracles"
        raise UserError(f"these records are of {contents}", next_step="name one with --strategy")
    return names[0]


def _origin(entries: Collection[_Known], name: str) -> Origin:
    """Return where the strategy's records come from; of several versions of one revision the last by name."""
    origins = {canonical(one.origin.model_dump(mode="json")): one.origin for one in entries}
    if len(listed := sorted({origin.identity for origin in origins.values()})) > 1:
        raise UserError(
            f"the records of '{name}' are of several revisions", got=", ".join(listed),
            next_step="give the command of the run again, which makes those of earlier ones anew",
        )  # fmt: skip
    origin = origins[max(origins)]
    if not origin.revision:
        raise UserError(f"the records of '{name}' do not say of which revision", next_step="run them from a file")
    return origin


def _suite(asked: Collection[Asked], entries: Collection[_Known], out: Path) -> Asked:
    """Return the suite that the records answer in full: of several the one that asks for most; or what else they are.

    A folder of an earlier sparsebench has the suite's name where only a part of it was asked for.
    """
    if not asked:
        raise UserError(f"{out} does not say which suite it answers", next_step=AGAIN)
    settings = {one.setting for one in entries}
    full = [one for one in asked if set(one.settings) <= settings]
    if not full:
        one = min(asked, key=lambda one: len(set(one.settings) - set(settings)))
        missing = len(set(one.settings) - set(settings))
        raise UserError(
            f"incomplete: records of {missing} of the {len(one.settings)} settings of suite {one.name} {one.version} "
            "are missing", next_step="give the command of the run again"
        )  # fmt: skip
    cells = [one.cell for one in entries]
    named = [one for one in full if one.name != manifests.OWN and not unanswered_of(one, cells)]
    if not named:
        return Asked(
            name=manifests.OWN, version=1, settings=tuple(sorted({each for one in full for each in one.settings}))
        )
    largest = [one for one in named if len(one.settings) == max(len(other.settings) for other in named)]
    if len(largest) > 1:
        listed = ", ".join(f"{one.name} {one.version}" for one in largest)
        raise UserError(f"{out} answers several suites: {listed}", next_step="run each into a folder of its own")
    return largest[0]


def _choose(known: Iterable[_Known], name: str, suite: Asked) -> list[_Known]:
    """Return what is published, by the hashes of the cells."""
    settings, by_id = set(suite.settings), {one.cell_id: one for one in known}
    ids = {
        one.cell_id
        for one in by_id.values()
        if one.setting in settings and (one.strategy == name or one.kind != "deployable")
    }
    starts = {by_id[cell_id].start for cell_id in ids} & set(by_id)
    return [by_id[cell_id] for cell_id in sorted(ids | starts)]


def _write(part: Path, out: Path, chosen: list[_Known], source: tuple[str, str], suite: Asked) -> None:
    """Write all but the manifest."""
    with files.whole_file(part / RECORDS) as file:
        file.writelines(lines(one.place for one in chosen))
    _copy(out, part, environment.FOLDER, {one.machine for one in chosen} - {""})
    described, sources = manifests.strategies(out), {(one.strategy, one.origin.revision) for one in chosen} | {source}
    for key in sources & set(described):  # those of earlier versions have other names in the run's folder
        store.keep(part / manifests.STRATEGIES, described[key].model_dump(mode="json"))
    store.keep(part / manifests.SUITES, suite.model_dump(mode="json"))
    _copy(out, part, manifests.PICTURES, (digest(one.model_dump(mode="json")) for one in manifests.left_out(out)))


def _copy(out: Path, part: Path, folder: str, hashes: Iterable[str]) -> None:
    for name in hashes:
        try:
            content = content_of(out / folder / f"{name}.json")
        except OSError as error:
            raise UserError(f"{out}/{folder}/{name}.json is not there: {error.strerror}", next_step=AGAIN) from error
        files.write_whole(part / folder / f"{name}.json", content)


def git_steps(submission: Submission) -> str:
    """Return what to type to publish a submission that lies in a clone of the repository."""
    suite, about = submission.manifest.suite, f"{submission.manifest.strategy}-{submission.manifest.version}"
    of_suite = "" if suite.name == manifests.OWN else f" for suite {suite.name} {suite.version}"
    return (
        f"git switch -c submit-{about}\n"
        f"git add {shlex.quote(str(submission.folder))}\n"
        f'git commit -m "Records of {submission.manifest.strategy}{of_suite}"\n'
        f"git push -u origin submit-{about}\n"
        "then open a pull request; the same checks run there"
    )
