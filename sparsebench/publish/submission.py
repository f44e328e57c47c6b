"""Submissions: write one from a run's folder, and check from its files alone whether it is complete and consistent.

FOLDER/manifest.json                the strategy and its origin
FOLDER/records/records.parquet      a sealed file: the records, their machines, strategies and suite
FOLDER/plugin/                      the strategy's file, and the modules of its author that it imports
FOLDER/replays/                     replays by others, see `replays`

Files of other plugins are left out: cells of their tasks and models can be checked, but not run again. Apart from the
manifest and the plugin, a submission has the layout of a run's folder and can be read as one. No code of a submission
is run here. Accuracies must follow from the outcomes of test items, and MACs from the token counts and the network's
closed form. Not checked are `test_loss` and `p_label`, because records have no losses of single items, `iou_pixels` and
`accuracy_boundary`, because they have no pixels, and results that depend on a task or model of a plugin, because no
plugin is imported.
"""

from __future__ import annotations

import base64
import math
import os
import re
import secrets
import shutil
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from operator import not_
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from sparsebench import __version__, files
from sparsebench.errors import UserError, few, plain, reason_of, unknown
from sparsebench.measure.cost import CostModel
from sparsebench.measure.metrics import TOP_5_FROM, Items, Metric, decider_of, scores
from sparsebench.measure.patches import Overlap, by_relevance
from sparsebench.plan.coverage import missing_cells
from sparsebench.plan.suite import exists, load
from sparsebench.plugin.content import CODE, file_revision
from sparsebench.plugin.registry import Registry
from sparsebench.publish.about import About, key_of
from sparsebench.records import manifests, store, table
from sparsebench.records.manifests import MANIFEST, FileEntry, StrategyEntry, SuiteEntry, setting_of
from sparsebench.records.record import Cell, Origin, Part, Record, Value, canonical, digest, numbers_of
from sparsebench.strategy.budget import FULL
from sparsebench.strategy.spec import fill
from sparsebench.tasks.base import Task

RECORDS, PLUGIN = "records/records.parquet", "plugin"
AGAIN = "run the same command again: it runs cells that are missing or have another revision"
Badge = Literal["rejected", "reported", "replayed"]
"""Badges in rising order; "rejected" stands for no badge."""
MEANINGS: dict[Badge, str] = {
    "rejected": "incomplete or inconsistent",
    "reported": "complete and consistent; nobody has run it again",
    "replayed": "complete and consistent; randomly drawn cells agree when they are run again here",
}
ALONE = "a submission has no plugin but the strategy's"
DIFFERS = "complete and consistent; cells that were run again here do not agree"
UNFIT = "complete and consistent; a file of a replay does not fit"
KEPT = "complete and consistent; according to its files, others have run randomly drawn cells again, and they agree"
THERE = "it was there already, with the same records and authors"
MOST_BYTES = 1_000_000
"""Largest size of a manifest."""
MOST_REASONS = 5
"""Maximum number of reasons in a verdict."""
MOST_LETTERS = 30
"""Maximum number of letters of an author in the name of a submission's folder."""
TOLERANCE = 1e-12
"""Relative and absolute tolerance. Other builds sum in another order, with errors of log2(n) 2^-53 (Higham 1993)."""
BY_GROUP, TRAINED, TOP_5 = "accuracy: ", "train_samples: ", "accuracy_top5"


class Manifest(Value):
    """The manifest of a submission.

    Attributes:
        strategy: the published strategy; all other records are of baselines and oracles of the same run.
        plugin: the origin of the strategy.
        file: name of the strategy's file below `plugin`; "" for an installed or shipped strategy.
        records: SHA-256 of the file of records.
        about: who submits.
        date: day on which the newest cell of the strategy started, UTC.
        sparsebench: version of sparsebench that wrote the submission.
        replaces: version of an earlier submission of the strategy by one of the same authors, which boards then leave
            out; "" for none.

    Earlier submissions lack the last four fields.
    """

    schema_version: Literal[3] = 3
    strategy: str
    plugin: Origin
    file: str = ""
    records: str
    about: About = Field(default_factory=About, exclude_if=lambda about: about == About())
    date: str = Field("", pattern=r"^(\d{4}-\d{2}-\d{2})?$", exclude_if=not_)
    sparsebench: str = Field("", pattern=r"^[0-9A-Za-z.+-]{0,40}$", exclude_if=not_)
    replaces: str = Field("", exclude_if=not_)


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a submission. Raise UserError or OSError if it is missing or invalid."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise UserError(f"there is no {MANIFEST}")
    try:
        return Manifest.model_validate_json(files.own_content(path, MOST_BYTES), strict=True)
    except (UserError, ValidationError) as error:
        raise UserError(f"{MANIFEST}: {reason_of(error)}") from error


def submissions_in(folder: Path) -> list[Path]:
    """Return the submissions below a folder: its folders with a manifest, and the folders in its other folders.

    The folder itself is the only one if it has a manifest.
    """
    if (folder / MANIFEST).is_file():
        return [folder]
    inner = [path for path in folder.glob("*") if (path / MANIFEST).is_file()]
    outer = [path for path in folder.glob("*/*") if path.is_dir() and path.parent not in inner]
    return sorted(path for path in inner + outer if not _is_hidden(path.relative_to(folder)))


def files_of(folder: Path) -> list[Path]:
    """Return the files of a submission, without links, hidden files and compiled modules."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sorted(path for path in paths if not _is_hidden(path.relative_to(folder)) and path.suffix != ".pyc")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def plugin_of(folder: Path, manifest: Manifest) -> Path | None:
    """Return the strategy's file in a submission, or None for an installed or shipped strategy."""
    return (folder / PLUGIN / manifest.file).absolute() if manifest.file else None


def version_of(suite: SuiteEntry, plugin: Origin, about: About | None = None) -> str:
    """Return the version of a submission: suite (or `OWN`), version of the suite, and revision of the strategy.

    The first author follows, if any, because several groups may submit the same strategy.
    """
    version = suite.version if suite.name != manifests.OWN else digest(suite.model_dump(mode="json"))[:12]
    parts = [suite.name, str(version), plugin.revision]
    if about is not None and about.authors:
        parts.append(_short(about.authors[0]))
    return "-".join(parts)


def _version(folder: Path, suite: SuiteEntry, manifest: Manifest) -> str:
    """Return the name that a submission's folder must have. Earlier submissions have no author in it."""
    earlier = version_of(suite, manifest.plugin)
    return earlier if folder.absolute().name == earlier else version_of(suite, manifest.plugin, manifest.about)


def _short(author: str) -> str:
    """Return a name in lower-case ASCII letters, digits and hyphens; a hash if it has no letter of these."""
    letters = unicodedata.normalize("NFKD", author).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", letters)[:MOST_LETTERS].strip("-") or digest(author)[:8]


def read_records(folder: Path) -> Iterator[Record]:
    """Yield the records of a submission. Raise ValueError or UserError if a record or the file is damaged."""
    return map(table.record_of, table.rows_of(table.read(folder / RECORDS)))


@dataclass
class Verdict:
    """The result of the checks of a submission.

    Attributes:
        badge: see `MEANINGS`.
        wrong: whether the submission is incomplete or inconsistent, or disagrees with its replay.
        why: the reasons if `wrong`.
        strategy, version, suite, records: contents of the submission as far as readable; `suite` is "" without a suite.
        replays: who has run cells again, and when, according to the submission's files.
        unfit: why files of replays do not fit.
        notes: facts about a replay, such as the cells that were run again, about a withdrawal, or about what `submit`
            wrote.
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
    replays: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    @property
    def meaning(self) -> str:
        """The meaning of the badge."""
        if self.wrong and self.badge == "reported":
            return UNFIT if self.unfit else DIFFERS
        is_kept = self.badge == "replayed" and bool(self.replays)
        return KEPT if is_kept else MEANINGS[self.badge]

    def settle(self, why: Sequence[str], badge: Badge) -> None:
        """Store the reasons why the submission is wrong; without any, set the badge."""
        more = [f"and {len(why) - MOST_REASONS} more"] if len(why) > MOST_REASONS else []
        self.why = [*why[:MOST_REASONS], *more]
        self.wrong = bool(why)
        self.badge = self.badge if why else badge


def verify(folder: Path, *, placed: bool = False) -> Verdict:
    """Check one submission from its files alone. The files may have any content: there is always a verdict.

    With `placed` the folder must be <strategy>/<version>, as for published submissions. torch is imported only if a
    cell's model is from timm.
    """
    verdict = Verdict(plain(folder, 500))
    try:
        wrong = list(_faults(folder, verdict, placed))
    except OSError as error:
        wrong = [f"it cannot be read: {error.strerror}"]
    except (ValueError, UserError) as error:
        wrong = [plain(error)]
    verdict.settle(wrong, "reported")
    if not wrong:
        from sparsebench.publish.replays import settle

        settle(folder, manifest_of(folder), verdict)
    return verdict


def badges(folder: Path) -> dict[str, str]:
    """Return the badge of the strategy that a folder submits, by its name; {} if the folder is not a submission."""
    if not os.path.lexists(folder / MANIFEST):
        return {}
    verdict = verify(folder)
    return {verdict.strategy: verdict.badge}


@contextmanager
def _whole_folder(folder: Path, is_there: bool) -> Iterator[Path]:
    """Give another folder beside it to fill, which becomes the folder at the end, unless that is there.

    Raises:
        UserError: the folder has appeared meanwhile.
    """
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        if not is_there:
            check_place(folder)
            os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _verified(folder: Path, out: Path) -> Verdict:
    """Return the verdict of `verify` on a submission; raise UserError if the run's folder `out` is at fault."""
    verdict = verify(folder)
    if verdict.wrong:
        raise UserError(
            f"{out} is incomplete or inconsistent: {'; '.join(verdict.why)}",
            next_step=f"{AGAIN}; --rerun always replaces all records",
        )
    return verdict


def submit(
    out: Path,
    to: Path,
    strategy: str | None = None,
    about: About | None = None,
    replaces: str = "",
    again: bool = False,
) -> Verdict:
    """Write the submission TO/<strategy>/<version>/ from a run's folder, and return the verdict of `verify`.

    A submission has every record of the strategy, including failures, in the suite if it is complete, otherwise in all
    settings. It has the records of baselines and oracles in the same settings, because differences are paired by seed
    and valid only within one run, and the records of cells whose weights other cells start from. It has no other
    deployable strategy. A strategy from a file comes with the file and the modules of its author that it imports. The
    same records and the same `about` always give the same bytes.

    Args:
        out: the run's folder.
        to: the folder of submissions.
        strategy: the strategy to publish, if the folder has several.
        about: who submits.
        replaces: version of an earlier submission of the strategy by one of the same authors.
        again: whether the same submission may be there already; it then stays as it is, with its replays.

    Raises:
        UserError: if the folder lacks the strategy, has several and none is named, or mixes its sources; if settings of
            the suite are missing; if no cell has a result; if the records are inconsistent; if the submission already
            exists; or if there is no submission that it can replace.
    """
    opened = store.Store(out)
    records = opened.records(needed=True)
    name = _strategy(records.values(), strategy)
    results = [record for record in records.values() if record.cell.strategy.name == name]
    origin = max((record.origin for record in results), key=repr)
    entry = _entry(opened, name, origin)
    suite = _suite(manifests.suites(opened), results, out)
    selection = _selection(records, name, suite)
    notes = list(_notes(name, origin, selection))

    about = about or About()
    folder = to / name / version_of(suite, origin, about)
    is_there = os.path.lexists(folder)
    if not again:
        check_place(folder)
    if replaces:
        check_replaced(to / name, replaces, about)
    with _whole_folder(folder, is_there) as part:
        rows = table.table_of((record, 0) for record in selection)
        table.write(part / RECORDS, rows, _sidecars(opened, selection, suite))
        _write_plugin(part, entry)
        manifest = Manifest(
            strategy=name,
            plugin=origin,
            file=entry.file,
            records=files.content_hash(part / RECORDS),
            about=about,
            date=_date_of(results),
            sparsebench=__version__,
            replaces=replaces,
        )
        write_manifest(part, manifest)
        verdict = _verified(part, out)
        if is_there:
            verdict = _unchanged(folder, manifest)
            notes.append(THERE)
    verdict.folder = str(folder)
    verdict.notes = notes
    return verdict


def _unchanged(folder: Path, manifest: Manifest) -> Verdict:
    """Return the verdict of a submission that is there already. Raise UserError if it is another one, or rejected."""
    if manifest_of(folder) != manifest:
        raise _exists(folder)
    verdict = verify(folder, placed=True)
    if verdict.wrong:
        raise UserError(
            f"{folder} is rejected: {few(verdict.why, 2)}", next_step="remove it, and run the command again"
        )
    return verdict


def check_place(folder: Path, manifest: Manifest | None = None) -> bool:
    """Return whether the place of a submission has the same one already.

    Args:
        folder: the place.
        manifest: the manifest of the submission that may be there already; None if nothing may be there.

    Raises:
        UserError: something else is there, or the same submission is there and rejected.
    """
    if not os.path.lexists(folder):
        return False
    if manifest is None:
        raise _exists(folder)
    _unchanged(folder, manifest)
    return True


def _exists(folder: Path) -> UserError:
    return UserError(f"{folder} already exists and is not overwritten", next_step="remove it, or give another --to")


def _date_of(records: Collection[Record]) -> str:
    """Return the day on which the newest of the cells began."""
    return max(record.started for record in records)[:10]


def _entry(opened: store.Store, name: str, origin: Origin) -> StrategyEntry:
    """Return the description of the strategy to publish, with its source if the strategy comes from a file."""
    entry = manifests.strategies(opened).get((name, origin.revision))
    if entry is None or (origin.plugin.startswith("file:") and not entry.source):
        gap = "description" if entry is None else "source file"
        raise UserError(f"{opened.path} lacks the {gap} of strategy '{name}'", next_step=AGAIN)
    return entry


def _selection(records: Mapping[str, Record], name: str, suite: SuiteEntry) -> list[Record]:
    """Return the records of a submission: those of the strategy and of baselines and oracles in the suite.

    The records of cells whose weights they start from follow.

    Args:
        records: all records of the run, by cell id.
        name: the strategy.
        suite: the suite.
    """
    selection = {}
    for cell_id, record in records.items():
        is_published = record.cell.strategy.name == name or record.kind != "deployable"
        if is_published and setting_of(record.cell) in suite.settings:
            selection[cell_id] = record
    starts = {record.cell.init.id for record in selection.values() if record.cell.init is not None}
    selection |= {cell_id: records[cell_id] for cell_id in starts & set(records)}
    return list(selection.values())


def _sidecars(opened: store.Store, records: Collection[Record], suite: SuiteEntry) -> dict[str, str]:
    """Return the texts that describe the records of a submission, by file name.

    They are the suite, the strategies without their source, the pictures that were left out, and the machines.
    """
    values: list[tuple[str, Value]] = [(manifests.SUITES, suite)]
    strategies = manifests.strategies(opened)
    used = {(record.cell.strategy.name, record.origin.revision) for record in records}
    for key in used & set(strategies):
        without_source = strategies[key].model_copy(update={"file": "", "source": {}, "data": {}})
        values.append((manifests.STRATEGIES, without_source))
    for name, line in manifests.omissions(opened):
        values.append((manifests.FILES, FileEntry(name=name, left_out=line)))

    sidecars = {}
    for folder, value in values:
        content = value.model_dump(mode="json")
        sidecars[f"{folder}/{digest(content)}.json"] = canonical(content)
    machines = {record.environment for record in records}
    for path, text in opened.sidecars(manifests.ENVIRONMENTS).items():
        if Path(path).stem in machines:
            sidecars[path] = text
    return sidecars


def _write_plugin(folder: Path, entry: StrategyEntry) -> None:
    """Write the strategy's file, and the modules of its author that it imports, into a submission."""
    for path, text in entry.source.items():
        files.write_whole(folder / PLUGIN / path, text.encode())
    for path, text in entry.data.items():
        files.write_whole(folder / PLUGIN / path, base64.b64decode(text))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a submission."""
    files.write_whole(folder / MANIFEST, (canonical(manifest.model_dump(mode="json")) + "\n").encode())


def check_replaced(place: Path, version: str, about: About) -> None:
    """Check that one of the authors has a submission of a version in a strategy's folder. Raise UserError if not."""
    versions = sorted(path.parent.name for path in place.glob(f"*/{MANIFEST}"))
    if version not in versions:
        raise UserError(
            "there is no submission to replace",
            got=f"'{plain(version, 100)}'",
            allowed=few(versions, 5) or f"none, as {place} has no submission",
            next_step="pull the newest commit of the repository into this clone",
        )
    earlier = manifest_of(place / version).about
    if not share_author(earlier, about):
        raise UserError(
            f"{place / version} is by others",
            got=few(about.authors, 3, 60) or "no author",
            allowed=f"one of {few(earlier.authors, 3, 60)}" if earlier.authors else "none, as it names no author",
        )


def share_author(first: About, second: About) -> bool:
    """Return whether two submissions have an author in common, by the letters of the names."""
    names = [set(map(key_of, about.authors)) for about in (first, second)]
    return bool(names[0] & names[1])


def _strategy(records: Collection[Record], choice: str | None) -> str:
    """Return the name of the strategy to publish: the choice, or the only deployable strategy."""
    kinds = {record.cell.strategy.name: record.kind for record in records}
    names = [choice] if choice is not None else sorted(name for name, kind in kinds.items() if kind == "deployable")
    if len(names) != 1:
        contents = f"strategies {', '.join(names)}" if names else "baselines and oracles only"
        raise UserError(f"the folder has records of {contents}", next_step="name a strategy with --strategy")
    if names[0] not in kinds:
        raise unknown("strategy in these records", names[0], kinds)
    return names[0]


def _notes(name: str, plugin: Origin, records: Collection[Record]) -> Iterator[str]:
    """Yield what users should know about the records of a submission.

    Raises:
        UserError: no cell of the strategy has a result.
    """
    of_strategy = [record for record in records if record.cell.strategy.name == name]
    failures: Counter[str] = Counter()
    for record in of_strategy:
        if record.status != "ok":
            failures[f"{record.status}: {record.failure.reason if record.failure else ''}"] += 1
    if failures:
        reason, count = failures.most_common(1)[0]
        most = f"{count} {plain(reason)}"
        if failures.total() == len(of_strategy):
            raise UserError(
                f"nothing to submit: no cell of '{name}' has a result",
                got=most,
                next_step="correct the cause and run again",
            )
        yield f"{failures.total()} of {len(of_strategy)} cells of '{name}' have no result, among them {most}"
    missing = lacking([record.cell for record in records], plugin)
    if missing:
        yield f"cells of {few(missing)} cannot be replayed: {ALONE}"


def is_own(cell: Cell, plugin: Origin) -> bool:
    """Return whether the strategy's plugin file also defines the task or the model of a cell."""
    return plugin.revision.startswith(CODE) and plugin.revision in (cell.task.revision, cell.model.revision)


def lacking(cells: Iterable[Cell], plugin: Origin) -> list[str]:
    """Return the tasks and models of cells that are defined in plugin files other than the strategy's."""
    parts = set()
    for one in cells:
        for cell in (one, *one.inits):
            parts.add(("task", cell.task.name, cell.task.revision))
            parts.add(("model", cell.model.name, cell.model.revision))
    return sorted(
        f"{kind} '{plain(name, 60)}'"
        for kind, name, revision in parts
        if revision.startswith(CODE) and revision != plugin.revision
    )


def _suite(suites: Collection[SuiteEntry], records: Collection[Record], out: Path) -> SuiteEntry:
    """Return the largest suite for which the records have all cells, or else `OWN` with the requested settings.

    If settings are missing, return the largest suite, so that `verify` names them. Folders of earlier versions may name
    a suite although only a part of it was requested.
    """
    if not suites:
        raise UserError(f"{out} does not name its suite", next_step=AGAIN)
    cells = [record.cell for record in records]
    settings = set(map(setting_of, cells))
    full = [suite for suite in suites if settings.issuperset(suite.settings)]
    complete = [suite for suite in full if suite.name != manifests.OWN and not unanswered_of(suite, cells)]
    if complete or not full:
        return max(complete or suites, key=lambda suite: len(suite.settings))
    hashes = {setting for suite in full for setting in suite.settings}
    return SuiteEntry(name=manifests.OWN, version=1, settings=tuple(sorted(hashes)))


def unanswered_of(suite: SuiteEntry, cells: Sequence[Cell]) -> list[str]:
    """Return the cells of a suite that a strategy lacks; empty if this version of sparsebench lacks the suite."""
    if not exists(suite.name) or (current := load(suite.name)).version != suite.version:
        return []
    unbudgeted = all(cell.budget == FULL for cell in cells)
    return missing_cells(current, cells, _registry(), any_budget=unbudgeted)


def _faults(folder: Path, verdict: Verdict, placed: bool) -> Iterator[str]:
    """Yield what is incomplete or inconsistent. Sets strategy, version and suite of the verdict."""
    manifest = manifest_of(folder)
    opened = store.Store(folder)
    suites = manifests.suites(opened)
    verdict.strategy = plain(manifest.strategy)
    description = manifests.strategies(opened).get((manifest.strategy, manifest.plugin.revision))
    if len(suites) != 1 or description is None:
        raise UserError("it must describe one suite, and its strategy with the revision in the manifest")
    (suite,) = suites
    if files.content_hash(folder / RECORDS) != manifest.records:
        yield f"the SHA-256 of '{RECORDS}' differs from {MANIFEST}"
    version = _version(folder, suite, manifest)
    verdict.version = plain(version)
    verdict.suite = "" if suite.name == manifests.OWN else plain(f"{suite.name} {suite.version}")
    if placed and folder.absolute().parts[-2:] != (manifest.strategy, version):
        yield f"its folder must be {plain(manifest.strategy)}/{plain(version)}"
    if placed and manifest.replaces and (folder.parent / manifest.replaces).is_dir():
        check_replaced(folder.parent, manifest.replaces, manifest.about)
    yield from _plugin_faults(folder, manifest)
    yield from _record_faults(opened, manifest, suite, description, verdict)


def _plugin_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield that the strategy's file is not that of the run, if so."""
    plugin = plugin_of(folder, manifest)
    if plugin is None or file_revision(plugin, alone=True) == manifest.plugin.revision:
        return
    n_files = sum(path.is_file() for path in (folder / PLUGIN).rglob("*"))
    others = ", or a file that it uses," if n_files > 1 else ""
    yield f"'{PLUGIN}/{plain(manifest.file)}'{others} is not the file of the run: its revision differs from {MANIFEST}"


def _record_faults(
    opened: store.Store, manifest: Manifest, suite: SuiteEntry, description: StrategyEntry, verdict: Verdict
) -> Iterator[str]:
    """Yield what is wrong with the records of a submission. Sets the number of records of the verdict."""
    machines = {Path(name).stem for name in opened.sidecars(manifests.ENVIRONMENTS)} | {""}
    settings = set(suite.settings)
    ids: set[str] = set()
    starts: set[str] = set()
    inits: set[str] = set()
    title = f"suite {verdict.suite}" if verdict.suite else "its cells without a suite"
    cells: list[Cell] = []
    for record in read_records(opened.path):
        verdict.records += 1
        cell = record.cell
        if record.cell_id in ids:
            fault = "has two records"
        elif record.environment not in machines:
            fault = "has an unknown machine"
        else:
            fault = _other_strategy(record, manifest, description)
        if fault:
            yield f"{cell_name(record)} {fault}"
        ids.add(record.cell_id)
        inits |= {init.id for init in cell.inits}
        if setting_of(cell) not in settings:
            starts.add(record.cell_id)
        elif cell.strategy.name == manifest.strategy:
            cells.append(cell)
        yield from (f"{cell_name(record)}: {text}" for text in differences(record))
    if strange := sorted(starts - inits):
        yield f"cell {strange[0]} is not part of the suite, and no cell starts from it"
    if gap := settings - set(map(setting_of, cells)):
        yield f"incomplete: it lacks {len(gap)} of the {len(settings)} settings of {title}"
    elif missing := unanswered_of(suite, cells):
        yield f"incomplete: it lacks {few(missing, 1)} of {title}"


def _other_strategy(record: Record, manifest: Manifest, description: StrategyEntry) -> str:
    """Return why the strategy of a record does not belong to the submission, or ""."""
    name = record.cell.strategy.name
    is_own = record.cell.strategy.name == manifest.strategy
    if is_own and (record.origin.identity, record.kind) != (manifest.plugin.identity, description.kind):
        return "has another revision or another kind than the submitted strategy"
    if not is_own and record.kind == "deployable":
        return "has another deployable strategy than the submitted one"
    labelled = record.label == name or record.label.startswith(f"{name}(")
    return "" if name.isidentifier() and labelled else f"has strategy '{plain(name, 60)}'"


def contradictions(folder: Path) -> Iterator[str]:
    """Yield the contradictions in the records of a run's folder; see `differences`."""
    for record in store.read(folder).values():
        for text in differences(record):
            yield f"{cell_name(record)}: {text}"


def cell_name(record: Record) -> str:
    """Return the cell of a record as text for messages."""
    return f"cell {record.cell_id} ({plain(record.label, 60)} on {plain(record.cell.task.name, 40)})"


def items_of(record: Record) -> Items:
    """Return the outcomes of a record's test items, with losses of 0. Raise ValueError if the record has none."""
    if (outcomes := record.outcomes) is None:
        raise ValueError("it has no outcomes")
    columns = (outcomes.predicted, outcomes.label, outcomes.group, outcomes.rank)
    predicted, labels, groups, ranks = (numbers_of(content, outcomes.n) for content in columns)
    return Items(predicted, labels, groups, ranks, np.zeros(outcomes.n, np.float32))


def differences(record: Record) -> Iterator[str]:
    """Yield the metrics of a record with status ok that do not follow from its outcomes and token counts."""
    if record.status != "ok":
        return
    task = None
    try:
        with suppress(UserError):  # a plugin's task, or parameters of an earlier version
            task = _task(canonical(record.cell.task.model_dump(mode="json")))
        items = items_of(record)
        if ((items.ranks > 0) != (items.predicted != items.labels)).any():
            yield "a test item's rank and its predicted class disagree"
        results = _scores(record, items)
        loss = record.metrics.get("test_loss")
        if task is not None and loss is not None and loss.value is not None:
            successes = task.successes(loss.value, items.accuracy)
            results |= {name: Metric.of(name, success, 1) for name, success in successes.items()}
        for name in sorted(results.keys() | record.metrics.keys()):
            if decider_of(name) == "outcomes" and (task is not None or name != "success"):  # a plugin's own criterion
                yield from _difference(name, record.metrics.get(name), results.get(name))
        if task is not None:
            yield from _costs(record, items, task)
    except (ValueError, ArithmeticError, UserError) as error:  # numbers that are too large, invalid parameters
        yield reason_of(error)


def _scores(record: Record, items: Items) -> dict[str, Metric]:
    """Return the metrics that follow from outcomes, by name.

    Metrics have names of groups, outcomes have numbers of groups. The numbers of items and of correct items of a group
    match names and numbers. Groups that are equal in both give the same metrics, so their order does not matter.
    """
    metrics = record.metrics
    names = [name.removeprefix(BY_GROUP) for name in metrics if name.startswith(BY_GROUP)]
    count, hits = (np.bincount(items.groups, weights=x, minlength=len(names)) for x in (None, items.correct))
    if len(count) > max(1, len(names)):
        raise ValueError("a test item has a group without a name")
    names.sort(key=lambda name: (metrics[BY_GROUP + name].n, metrics[BY_GROUP + name].value or 0.0))
    order = sorted(range(len(names)), key=lambda number: (count[number], hits[number]))
    labels = [name for _, name in sorted(zip(order, names, strict=True))] or ["all"]
    entries = (metrics.get(TRAINED + name) for name in labels)
    sizes = [0 if entry is None else int(entry.value or 0) for entry in entries]
    results = scores(items, TOP_5_FROM if TOP_5 in metrics else 2, labels, sizes)
    if "iou" in metrics:
        places = np.zeros_like(items.labels)  # it is the same for all partitions into images
        results["iou"] = Metric.of("iou", Overlap.of(items.predicted, items.labels, places).mean_iou(), len(places))
        results |= by_relevance(items)
    return {name: metric for name, metric in results.items() if decider_of(name) == "outcomes"}


def _costs(record: Record, items: Items, task: Task) -> Iterator[str]:
    """Yield the MACs that do not follow from the trajectory, if the MACs are known without building the network."""
    parts = [canonical(part.model_dump(mode="json")) for part in (record.cell.task, record.cell.model)]
    steps, n = record.trajectory, len(items.labels)
    if "macs" in record.metrics and record.cell.probe is not None and record.cell.probe.of_patches:
        n = record.metrics["macs"].n  # images, and the items are patches
    with suppress(UserError):
        classes = 0 if record.cell.probe else task.class_count(items.labels)  # features have no head
        cost = _cost(*parts, classes)
        dense = cost.dense()
        if len(steps) != len(dense):
            yield f"its trajectory has {len(steps)} blocks, but the model has {len(dense)}"
            return
        macs, most = float(cost.macs(steps)), float(cost.macs(dense))
        for name, value in (("macs", macs), ("macs_dense", most), ("macs_ratio", macs / most)):
            yield from _difference(name, record.metrics.get(name), Metric.of(name, value, n))


def _difference(name: str, reported: Metric | None, result: Metric | None) -> Iterator[str]:
    if reported is None or result is None:
        yield f"{plain(name, 60)} {'is missing' if reported is None else 'does not follow from the outcomes'}"
        return
    equal = (
        (reported.unit, reported.n) == (result.unit, result.n)
        and _close(reported.value, result.value)
        and _close(reported.low, result.low)
        and _close(reported.high, result.high)
    )
    if not equal:
        yield f"{plain(name, 60)} is {_words(reported)}, but the rest of the record gives {_words(result)}"


def _close(a: float | None, b: float | None) -> bool:
    """Return whether two numbers are equal within TOLERANCE, or both missing."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _words(metric: Metric) -> str:
    """Return a metric with all digits, its interval, unit and number."""
    return f"{metric.value!r} [{metric.low!r}, {metric.high!r}] {plain(metric.unit, 20)} of {metric.n}"


@lru_cache(maxsize=256)
def _task(part: str) -> Task:
    """Return the task of a part in canonical JSON. Raise UserError if this sparsebench does not have the task."""
    spec = Part.model_validate_json(part)
    return fill(_registry().task(spec.name), spec.params, f"task '{spec.name}'")


@lru_cache(maxsize=1)
def _registry() -> Registry:
    return Registry(shipped_only=True)


@lru_cache(maxsize=256)
def _cost(task: str, model: str, classes: int) -> CostModel:
    """Return the closed form of a network's MACs. Raise UserError if this sparsebench does not know it."""
    spec = Part.model_validate_json(model)
    return fill(_registry().model(spec.name), spec.params, f"model '{spec.name}'").cost(_task(task), classes)
