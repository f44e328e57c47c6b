"""From a run's folder to a submission: one strategy's records, for a suite or not, with the baselines beside it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsebench.errors import UserError, unknown
from sparsebench.publish.folder import (
    MANIFEST,
    PLUGIN,
    Answered,
    Manifest,
    hashes_of,
    version_of,
    write_records,
)
from sparsebench.publish.verify import Verdict, unanswered_of, verify
from sparsebench.records import environment, files, manifests, store
from sparsebench.records.cell import canonical, digest
from sparsebench.records.manifests import Asked, Described, setting_of
from sparsebench.records.origin import Origin
from sparsebench.records.record import Record
from sparsebench.text import few

AGAIN = "give the command of the run again: what is there is not run again, and the folder then says it"
_NAME = re.compile(r"\w[\w.-]{0,199}")


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
    A strategy from a file has that file in it, and the modules beside it that it imports.

    Raises:
        UserError: the folder has no such strategy, or several; the records are not all of one source; they lack
            settings of the suite; what would be published contradicts itself; or it is there already.
    """
    records = store.read(out)
    if not records:
        raise UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")
    name = _strategy(records.values(), strategy)
    own = [record for record in records.values() if record.cell.strategy.name == name]
    origin, described = _origin(own, name), manifests.strategies(out)
    about = described.get((name, origin.revision))
    if about is None or (origin.plugin.startswith("file:") and not about.source):
        missing = "what strategy" if about is None else "from which file strategy"
        raise UserError(f"{out} does not say {missing} '{name}' is", next_step=AGAIN)
    suite = _suite(manifests.suites(out), own, out)
    chosen = _choose(records, name, suite)
    answered = Answered(name=suite.name, version=suite.version, sha256=suite.sha256)
    version = version_of(answered, origin)
    outside = [path for path in about.source if path.startswith("/") or ".." in path.split("/")]
    if odd := [part for part in (name, version) if not _NAME.fullmatch(part)] + outside:
        raise UserError(
            "the name of a folder of the submission", got=repr(odd[0]), allowed="letters, digits, _, - and ."
        )
    folder = to / name / version
    if folder.is_symlink() or folder.exists():
        raise UserError(f"{folder} is there and is not written over", next_step="remove it, or give another --to")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        write_records(part, chosen, _beside(out, chosen, described, suite))
        for path, text in about.source.items():
            files.write_whole(part / PLUGIN / path, text.encode())
        manifest = Manifest(
            strategy=name, version=folder.name, plugin=origin, file=about.file, suite=answered, files=hashes_of(part)
        )
        files.write_whole(part / MANIFEST, (canonical(manifest.model_dump(mode="json")) + "\n").encode())
        verdict = verify(part)
        if verdict.wrong:
            raise UserError(f"{out} is not whole or not consistent: {'; '.join(verdict.why)}")
        verdict.folder = str(folder)
        os.replace(part, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Submission(folder, manifest, verdict)


def _strategy(records: Collection[Record], asked: str | None) -> str:
    """Return the name of the strategy to publish: as asked, or the only one that may be deployed."""
    kinds = {record.cell.strategy.name: record.kind for record in records}
    if asked is not None:
        if asked not in kinds:
            raise unknown("strategy in these records", asked, kinds)
        return asked
    names = sorted(name for name, kind in kinds.items() if kind == "deployable")
    if len(names) != 1:
        contents = f"strategies {', '.join(names)}" if names else "no strategy but baselines and oracles"
        raise UserError(f"these records are of {contents}", next_step="name one with --strategy")
    return names[0]


def _origin(own: Collection[Record], name: str) -> Origin:
    """Return where the strategy's records come from; of several versions of one revision the last by name."""
    origins = {canonical(one.origin.model_dump(mode="json")): one.origin for one in own}
    if len(identities := sorted({origin.identity for origin in origins.values()})) > 1:
        raise UserError(
            f"the records of '{name}' are of several revisions", got=few(identities),
            next_step="give the command of the run again, which makes those of earlier ones anew",
        )  # fmt: skip
    origin = origins[max(origins)]
    if not origin.revision:
        raise UserError(f"the records of '{name}' do not say of which revision", next_step="run them from a file")
    return origin


def _suite(asked: Collection[Asked], own: Collection[Record], out: Path) -> Asked:
    """Return the suite that the records answer in full: of several the one that asks for most; or what else they are.

    A folder of an earlier sparsebench has the suite's name where only a part of it was asked for.
    """
    if not asked:
        raise UserError(f"{out} does not say which suite it answers", next_step=AGAIN)
    settings, cells = {setting_of(one.cell) for one in own}, [one.cell for one in own]
    missing = {one: len(set(one.settings) - settings) for one in asked}
    full = [one for one in asked if not missing[one]]
    if not full:
        one = min(asked, key=missing.__getitem__)
        raise UserError(
            f"incomplete: records of {missing[one]} of the {len(one.settings)} settings of suite {one.name} "
            f"{one.version} are missing", next_step="give the command of the run again",
        )  # fmt: skip
    named = [one for one in full if one.name != manifests.OWN and not unanswered_of(one, cells)]
    if not named:
        every = {each for one in full for each in one.settings}
        return Asked(name=manifests.OWN, version=1, settings=tuple(sorted(every)))
    largest = [one for one in named if len(one.settings) == max(len(other.settings) for other in named)]
    if len(largest) > 1:
        listed = ", ".join(f"{one.name} {one.version}" for one in largest)
        raise UserError(f"{out} answers several suites: {listed}", next_step="run each into a folder of its own")
    return largest[0]


def _choose(records: Mapping[str, Record], name: str, suite: Asked) -> list[Record]:
    """Return what is published, by the hashes of the cells."""
    settings = set(suite.settings)
    ids = {
        cell_id
        for cell_id, one in records.items()
        if (one.cell.strategy.name == name or one.kind != "deployable") and setting_of(one.cell) in settings
    }
    starts = {init.id for cell_id in ids if (init := records[cell_id].cell.init) is not None}
    return [records[cell_id] for cell_id in sorted(ids | (starts & set(records)))]


def _beside(
    out: Path, chosen: Collection[Record], described: Mapping[tuple[str, str], Described], suite: Asked
) -> dict[str, str]:
    """Return by file name what lies beside the records."""
    things = [(manifests.SUITES, suite.model_dump(mode="json"))]
    for key in {(one.cell.strategy.name, one.origin.revision) for one in chosen} & set(described):
        said = described[key].model_copy(update={"file": "", "source": {}})
        things.append((manifests.STRATEGIES, said.model_dump(mode="json")))
    things += [(manifests.PICTURES, one.model_dump(mode="json")) for one in manifests.left_out(out)]
    texts = {f"{folder}/{digest(thing)}.json": canonical(thing) for folder, thing in things}
    machines = store.beside(out, environment.FOLDER)
    for file in {f"{one.environment}.json" for one in chosen if one.environment}:
        if file not in machines:
            raise UserError(f"{out} does not hold {environment.FOLDER}/{file}", next_step=AGAIN)
        texts[f"{environment.FOLDER}/{file}"] = machines[file]
    return texts


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
