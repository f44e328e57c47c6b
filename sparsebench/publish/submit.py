"""From a run's folder to a submission: one strategy's records, for a suite or not, with the baselines beside it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path

from sparsebench import files
from sparsebench.errors import UserError, unknown
from sparsebench.publish import MANIFEST
from sparsebench.publish.verify import PLUGIN, RECORDS, Manifest, Verdict, unanswered_of, verify, version_of
from sparsebench.records import manifests, store, table
from sparsebench.records.manifests import Asked, Given, setting_of
from sparsebench.records.record import Record, Value, canonical, digest

AGAIN = "give the command of the run again: it runs what is missing or of another revision"


def submit(out: Path, to: Path, strategy: str | None = None) -> Verdict:
    """Write TO/<strategy>/<version>/ from a run's folder, and return what `verify` says of it.

    It has every record of the strategy in the suite that the folder answers, or else in all that was run, failures
    among them; those of the baselines and oracles in the same settings, since differences to them are paired by seed
    and only hold for records of one run; and those of the cells that others start from. No other deployable strategy's.
    A strategy from a file has that file in it, and the modules beside it that it imports. The same records always give
    the same bytes.

    Raises:
        UserError: the folder has no such strategy, or several; the records are not all of one source; they lack
            settings of the suite; what would be published contradicts itself; or it is there already.
    """
    records = store.read(out, needed=True)
    name = _strategy(records.values(), strategy)
    own = [record for record in records.values() if record.cell.strategy.name == name]
    origin, described = max((one.origin for one in own), key=repr), manifests.strategies(out)
    about = described.get((name, origin.revision))
    if about is None or (origin.plugin.startswith("file:") and not about.source):
        missing = "what strategy" if about is None else "from which file strategy"
        raise UserError(f"{out} does not say {missing} '{name}' is", next_step=AGAIN)
    suite = _suite(manifests.suites(out), own, out)
    chosen = {
        cell_id: one
        for cell_id, one in records.items()
        if (one.cell.strategy.name == name or one.kind != "deployable") and setting_of(one.cell) in suite.settings
    }
    starts = {one.cell.init.id for one in chosen.values() if one.cell.init is not None}
    chosen |= {cell_id: records[cell_id] for cell_id in starts & set(records)}

    revisions = {(one.cell.strategy.name, one.origin.revision) for one in chosen.values()}
    said = [described[key].model_copy(update={"file": "", "source": {}}) for key in revisions & set(described)]
    things: list[tuple[str, Value]] = [(manifests.SUITES, suite), *((manifests.STRATEGIES, one) for one in said)]
    things += [(manifests.FILES, Given(name=name, left_out=line)) for name, line in manifests.left_out(out)]
    dumped = [(folder, one.model_dump(mode="json")) for folder, one in things]
    beside = {f"{folder}/{digest(one)}.json": canonical(one) for folder, one in dumped}
    machines = store.beside(out, manifests.ENVIRONMENTS)
    used = {f"{manifests.ENVIRONMENTS}/{one.environment}.json" for one in chosen.values()}
    beside |= {name: text for name, text in machines.items() if name in used}

    folder = to / name / version_of(suite, origin)
    if folder.is_symlink() or folder.exists():
        raise UserError(f"{folder} is there and is not written over", next_step="remove it, or give another --to")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        table.write(part / RECORDS, table.table_of((one, 0) for one in chosen.values()), beside)
        for path, text in about.source.items():
            files.write_whole(part / PLUGIN / path, text.encode())
        records_hash = files.content_hash(part / RECORDS)
        manifest = Manifest(strategy=name, plugin=origin, file=about.file, records=records_hash)
        files.write_whole(part / MANIFEST, (canonical(manifest.model_dump(mode="json")) + "\n").encode())
        verdict = verify(part)
        if verdict.wrong:
            raise UserError(f"{out} is not whole or not consistent: {'; '.join(verdict.why)}", next_step=AGAIN)
        verdict.folder = str(folder)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return verdict


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


def _suite(asked: Collection[Asked], own: Collection[Record], out: Path) -> Asked:
    """Return the suite that the records answer in full: of several the one that asks for most; or what else they are.

    A folder of an earlier sparsebench has the suite's name where only a part of it was asked for.
    """
    if not asked:
        raise UserError(f"{out} does not say which suite it answers", next_step=AGAIN)
    cells = [one.cell for one in own]
    settings = set(map(setting_of, cells))
    full = [one for one in asked if settings.issuperset(one.settings)]
    named = [one for one in full if one.name != manifests.OWN and not unanswered_of(one, cells)]
    if named or not full:  # then `verify` says what is missing
        return max(named or asked, key=lambda one: len(one.settings))
    every = {each for one in full for each in one.settings}
    return Asked(name=manifests.OWN, version=1, settings=tuple(sorted(every)))


def git_steps(made: Verdict) -> str:
    """Return what to type to publish a submission that lies in a clone of the repository."""
    about = f"{made.strategy}-{made.version}"
    return (
        f"git switch -c submit-{about}\n"
        f"git add {shlex.quote(made.folder)}\n"
        f'git commit -m "Records of {made.strategy}{f" for suite {made.suite}" if made.suite else ""}"\n'
        f"git push -u origin submit-{about}\n"
        "then open a pull request; the same checks run there"
    )
