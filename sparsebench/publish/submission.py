"""A submission: how it is written from a run's folder, and whether it is complete and consistent, by its files alone.

FOLDER/manifest.json                which strategy it publishes, and where that came from
FOLDER/records/records.parquet      a sealed file: the records, and what their machines, strategies and suite are
FOLDER/plugin/                      the strategy's file, and the modules beside it that it imports

But for the manifest and the plugin it is laid out as a run's folder, and can be read as one. None of its code is run.

Accuracies follow from the outcomes of the test items, MACs from the token counts and the network's closed form. The
losses of single items are in no record, so `test_loss` and `p_label` are taken as they stand. What belongs to a
task or model of a plugin is taken as it stands too: nothing of a plugin is imported here.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from sparsebench import files
from sparsebench.errors import UserError, few, plain, reason_of, unknown
from sparsebench.measure.cost import CostModel
from sparsebench.measure.metrics import TOP_5_FROM, Items, Metric, decider_of, scores
from sparsebench.plan.expand import gaps
from sparsebench.plan.request import load, names
from sparsebench.plugin.content import file_revision
from sparsebench.plugin.registry import Registry
from sparsebench.publish import MANIFEST
from sparsebench.records import manifests, store, table
from sparsebench.records.manifests import FileEntry, StrategyEntry, SuiteEntry, setting_of
from sparsebench.records.record import Cell, Origin, Part, Record, Value, canonical, digest, numbers_of
from sparsebench.strategy.budget import FULL
from sparsebench.strategy.spec import fill
from sparsebench.tasks.base import Task

RECORDS, PLUGIN = "records/records.parquet", "plugin"
AGAIN = "give the command of the run again: it runs what is missing or of another revision"
Badge = Literal["rejected", "reported", "replayed"]
"""In rising order; what is rejected has none."""
MEANINGS: dict[Badge, str] = {
    "rejected": "incomplete or inconsistent",
    "reported": "complete and consistent; nobody has run it again",
    "replayed": "complete and consistent; cells drawn by chance, run again here, agree",
}
DIFFERS = "complete and consistent; cells that were run again here do not agree"
SHOWN = 5
"""Reasons that a verdict has."""
TOLERANCE = 1e-12
"""Relative: another build may sum in another order, which differs by log2(n) 2^-53 (Higham 1993)."""
BY_GROUP, TRAINED, TOP_5 = "accuracy: ", "train_samples: ", "accuracy_top5"


class Manifest(Value):
    """What a submission is.

    Attributes:
        strategy: whose records are published; what else there is are baselines and oracles that ran beside it.
        plugin: where the strategy came from.
        file: the plugin file, by its name below `plugin`; "" of a strategy that is installed or shipped.
        records: SHA-256 of the file of the records.
    """

    schema_version: Literal[3] = 3
    strategy: str
    plugin: Origin
    file: str = ""
    records: str


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a submission; UserError or OSError if there is none."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes(), strict=True)
    except FileNotFoundError as error:
        raise UserError(f"there is no {MANIFEST}") from error
    except ValidationError as error:
        raise UserError(f"{MANIFEST}: {reason_of(error)}") from error


def plugin_of(folder: Path, manifest: Manifest) -> Path | None:
    """Return the strategy's file in a submission, or None where it is installed or shipped."""
    return (folder / PLUGIN / manifest.file).absolute() if manifest.file else None


def version_of(suite: SuiteEntry, plugin: Origin) -> str:
    """Return the name of one version of a strategy that answers one version of a suite, or has cells of its own."""
    version = suite.version if suite.name != manifests.OWN else digest(suite.model_dump(mode="json"))[:12]
    return f"{suite.name}-{version}-{plugin.revision}"


def read_records(folder: Path) -> Iterator[Record]:
    """Yield the records of a submission; ValueError or UserError if one is none, or the file is damaged."""
    return map(table.record_of, table.rows_of(table.read(folder / RECORDS)))


@dataclass
class Verdict:
    """What was found of a submission.

    Attributes:
        badge: see `MEANINGS`.
        wrong: whether something contradicts something else, in the submission or in its replay.
        why: what does.
        strategy, version, suite, records: what it is, as far as it can be read; "" for cells of no suite.
        notes: what else there is to know of a replay: which cells were run again.
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
    def meaning(self) -> str:
        """What the badge means."""
        return DIFFERS if self.wrong and self.badge == "reported" else MEANINGS[self.badge]

    def settle(self, why: Sequence[str], badge: Badge) -> None:
        """Keep what contradicts something else; where nothing does it has the badge."""
        more = [f"and {len(why) - SHOWN} more"] if len(why) > SHOWN else []
        self.why, self.wrong, self.badge = [*why[:SHOWN], *more], bool(why), self.badge if why else badge


def verify(folder: Path, *, placed: bool = False) -> Verdict:
    """Return what can be told of one submission from its files alone; whatever they are, there is a verdict.

    torch is imported only where a cell's model is one of timm's.

    Args:
        folder: the submission's.
        placed: whether the folder must be called <strategy>/<version>, as those that are published are.
    """
    verdict = Verdict(plain(folder, 500))
    try:
        wrong = list(_faults(folder, verdict, placed))
    except OSError as error:
        wrong = [f"it cannot be read: {error.strerror}"]
    except (ValueError, UserError) as error:
        wrong = [plain(error)]
    verdict.settle(wrong, "reported")
    return verdict


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
    results = [record for record in records.values() if record.cell.strategy.name == name]
    origin, descriptions = max((record.origin for record in results), key=repr), manifests.strategies(out)
    about = descriptions.get((name, origin.revision))
    if about is None or (origin.plugin.startswith("file:") and not about.source):
        gap = "what strategy" if about is None else "from which file strategy"
        raise UserError(f"{out} does not say {gap} '{name}' is", next_step=AGAIN)
    suite = _suite(manifests.suites(out), results, out)
    selection = {
        cell_id: record
        for cell_id, record in records.items()
        if (record.cell.strategy.name == name or record.kind != "deployable")
        and setting_of(record.cell) in suite.settings
    }
    starts = {record.cell.init.id for record in selection.values() if record.cell.init is not None}
    selection |= {cell_id: records[cell_id] for cell_id in starts & set(records)}

    revisions = {(record.cell.strategy.name, record.origin.revision) for record in selection.values()}
    texts = [descriptions[key].model_copy(update={"file": "", "source": {}}) for key in revisions & set(descriptions)]
    things: list[tuple[str, Value]] = [(manifests.SUITES, suite), *((manifests.STRATEGIES, text) for text in texts)]
    things += [(manifests.FILES, FileEntry(name=name, left_out=line)) for name, line in manifests.omissions(out)]
    dumps = [(folder, thing.model_dump(mode="json")) for folder, thing in things]
    sidecars = {f"{folder}/{digest(value)}.json": canonical(value) for folder, value in dumps}
    ids, machines = {record.environment for record in selection.values()}, store.sidecars(out, manifests.ENVIRONMENTS)
    sidecars |= {name: text for name, text in machines.items() if Path(name).stem in ids}

    folder = to / name / version_of(suite, origin)
    if folder.is_symlink() or folder.exists():
        raise UserError(f"{folder} is there and is not written over", next_step="remove it, or give another --to")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        table.write(part / RECORDS, table.table_of((record, 0) for record in selection.values()), sidecars)
        for path, text in about.source.items():
            files.write_whole(part / PLUGIN / path, text.encode())
        records_hash = files.content_hash(part / RECORDS)
        manifest = Manifest(strategy=name, plugin=origin, file=about.file, records=records_hash)
        files.write_whole(part / MANIFEST, (canonical(manifest.model_dump(mode="json")) + "\n").encode())
        verdict = verify(part)
        if verdict.wrong:
            raise UserError(f"{out} is incomplete or inconsistent: {'; '.join(verdict.why)}", next_step=AGAIN)
        verdict.folder = str(folder)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return verdict


def _strategy(records: Collection[Record], choice: str | None) -> str:
    """Return the name of the strategy to publish: as asked, or the only one that may be deployed."""
    kinds = {record.cell.strategy.name: record.kind for record in records}
    names = [choice] if choice is not None else sorted(name for name, kind in kinds.items() if kind == "deployable")
    if len(names) != 1:
        contents = f"strategies {', '.join(names)}" if names else "no strategy but baselines and oracles"
        raise UserError(f"these records are of {contents}", next_step="name one with --strategy")
    if names[0] not in kinds:
        raise unknown("strategy in these records", names[0], kinds)
    return names[0]


def _suite(suites: Collection[SuiteEntry], records: Collection[Record], out: Path) -> SuiteEntry:
    """Return the suite that the records answer in full: of several the one that asks for most; or what else they are.

    A folder of an earlier sparsebench has the suite's name where only a part of it was asked for.
    """
    if not suites:
        raise UserError(f"{out} does not say which suite it answers", next_step=AGAIN)
    cells = [record.cell for record in records]
    settings = set(map(setting_of, cells))
    full = [suite for suite in suites if settings.issuperset(suite.settings)]
    whole = [suite for suite in full if suite.name != manifests.OWN and not unanswered_of(suite, cells)]
    if whole or not full:  # then `verify` says what is missing
        return max(whole or suites, key=lambda suite: len(suite.settings))
    hashes = {setting for suite in full for setting in suite.settings}
    return SuiteEntry(name=manifests.OWN, version=1, settings=tuple(sorted(hashes)))


def git_steps(verdict: Verdict) -> str:
    """Return what to type to publish a submission that lies in a clone of the repository."""
    about = f"{verdict.strategy}-{verdict.version}"
    return (
        f"git switch -c submit-{about}\n"
        f"git add {shlex.quote(verdict.folder)}\n"
        f'git commit -m "Records of {verdict.strategy}{f" for suite {verdict.suite}" if verdict.suite else ""}"\n'
        f"git push -u origin submit-{about}\n"
        "then open a pull request; the same checks run there"
    )


def unanswered_of(suite: SuiteEntry, cells: Sequence[Cell]) -> list[str]:
    """Return what a suite asks and cells of one strategy do not answer; nothing where the suite is not known here."""
    if suite.name not in names() or (current := load(suite.name)).version != suite.version:
        return []
    unbudgeted = all(cell.budget == FULL for cell in cells)
    return gaps(current, cells, _registry(), any_budget=unbudgeted)


def _faults(folder: Path, verdict: Verdict, placed: bool) -> Iterator[str]:
    """Yield what is incomplete or inconsistent; the verdict then says what the submission is."""
    manifest, suites = manifest_of(folder), manifests.suites(folder)
    verdict.strategy, plugin = plain(manifest.strategy), plugin_of(folder, manifest)
    description = manifests.strategies(folder).get((manifest.strategy, manifest.plugin.revision))
    if len(suites) != 1 or description is None:
        raise UserError("it does not say which suite it answers, or what its strategy is, or not of that revision")
    (suite,) = suites
    if files.content_hash(folder / RECORDS) != manifest.records:
        yield f"'{RECORDS}' has another SHA-256 than {MANIFEST} says"
    version = version_of(suite, manifest.plugin)
    verdict.version = plain(version)
    verdict.suite = "" if suite.name == manifests.OWN else plain(f"{suite.name} {suite.version}")
    if placed and folder.absolute().parts[-2:] != (manifest.strategy, version):
        yield f"its folder is not called {plain(manifest.strategy)}/{plain(version)}, which it is"
    if plugin is not None and file_revision(plugin) != manifest.plugin.revision:
        yield f"'{PLUGIN}/{plain(manifest.file)}' is not the file that was run"
    yield from _record_faults(folder, manifest, suite, description, verdict)


def _record_faults(
    folder: Path, manifest: Manifest, suite: SuiteEntry, description: StrategyEntry, verdict: Verdict
) -> Iterator[str]:
    """Yield what is wrong with the records of a submission; the verdict then says how many there are."""
    machines = {Path(name).stem for name in store.sidecars(folder, manifests.ENVIRONMENTS)} | {""}
    settings, ids, starts, inits = set(suite.settings), set[str](), set[str](), set[str]()
    title = f"suite {verdict.suite}" if verdict.suite else "cells of its own"
    cells: list[Cell] = []
    for record in read_records(folder):
        verdict.records += 1
        cell, twice = record.cell, record.cell_id in ids
        odd = "is there twice" if twice else "" if record.environment in machines else "has a machine without a name"
        if odd := odd or _other_strategy(record, manifest, description):
            yield f"{cell_name(record)} {odd}"
        ids.add(record.cell_id)
        inits |= {init.id for init in cell.inits}
        if setting_of(cell) not in settings:
            starts.add(record.cell_id)
        elif cell.strategy.name == manifest.strategy:
            cells.append(cell)
        yield from (f"{cell_name(record)}: {text}" for text in differences(record))
    if strange := sorted(starts - inits):
        yield f"cell {strange[0]} is not of the suite, and no cell starts from it"
    if gap := settings - set(map(setting_of, cells)):
        yield f"incomplete: it lacks {len(gap)} of the {len(settings)} settings of {title}"
    elif lacks := unanswered_of(suite, cells):
        yield f"incomplete: of {title} it lacks {few(lacks, 1)}"


def _other_strategy(record: Record, manifest: Manifest, description: StrategyEntry) -> str:
    """Return how a record is of another strategy than a submission may have, or "" where it is not."""
    name, is_own = record.cell.strategy.name, record.cell.strategy.name == manifest.strategy
    if is_own and (record.origin.identity, record.kind) != (manifest.plugin.identity, description.kind):
        return "is of another revision, or of another kind, than its strategy"
    if not is_own and record.kind == "deployable":
        return "is of another strategy than is submitted"
    labelled = record.label == name or record.label.startswith(f"{name}(")
    return "" if name.isidentifier() and labelled else f"has strategy '{plain(name, 60)}'"


def contradictions(folder: Path) -> Iterator[str]:
    """Yield what in the records of a run's folder does not follow from the rest of them, cell by cell."""
    for record in store.read(folder).values():
        for text in differences(record):
            yield f"{cell_name(record)}: {text}"


def cell_name(record: Record) -> str:
    """Return what messages call the cell of a record."""
    return f"cell {record.cell_id} ({plain(record.label, 60)} on {plain(record.cell.task.name, 40)})"


def items_of(record: Record) -> Items:
    """Return what came out for each test item of a record, with losses of 0; ValueError if that is not there."""
    if (outcomes := record.outcomes) is None:
        raise ValueError("it has no outcomes")
    columns = (outcomes.predicted, outcomes.label, outcomes.group, outcomes.rank)
    predicted, labels, groups, ranks = (numbers_of(content, outcomes.n) for content in columns)
    return Items(predicted, labels, groups, ranks, np.zeros(outcomes.n, np.float32))


def differences(record: Record) -> Iterator[str]:
    """Yield what in a record does not follow from its outcomes and token counts; nothing of one that is not ok."""
    if record.status != "ok":
        return
    try:
        items, task = items_of(record), _task(canonical(record.cell.task.model_dump(mode="json")))
        if ((items.ranks > 0) != (items.predicted != items.labels)).any():
            yield "a test item's rank and its predicted class disagree"
        results, loss = _scores(record, items), record.metrics.get("test_loss")
        if task is not None and loss is not None and loss.value is not None:
            successes = task.successes(loss.value, items.accuracy)
            results |= {name: Metric.of(name, success, 1) for name, success in successes.items()}
        for name in sorted(results.keys() | record.metrics.keys()):
            if decider_of(name) == "outcomes" and (task is not None or name != "success"):  # else its criterion
                yield from _difference(name, record.metrics.get(name), results.get(name))
        if task is not None:
            yield from _costs(record, items, task)
    except (ValueError, ArithmeticError, UserError) as error:  # numbers too large to count with, odd parameters
        yield reason_of(error)


def _scores(record: Record, items: Items) -> dict[str, Metric]:
    """Return what outcomes decide, by name.

    The groups have names in a record, and numbers in its outcomes. As many items, and as many right ones, tell which is
    which: groups that are alike in both are alike in all that follows.
    """
    metrics = record.metrics
    names = [name.removeprefix(BY_GROUP) for name in metrics if name.startswith(BY_GROUP)]
    count, hits = (np.bincount(items.groups, weights=x, minlength=len(names)) for x in (None, items.correct))
    if len(count) > max(1, len(names)):
        raise ValueError("a test item is in a group without a name")
    names.sort(key=lambda name: (metrics[BY_GROUP + name].n, metrics[BY_GROUP + name].value or 0.0))
    order = sorted(range(len(names)), key=lambda number: (count[number], hits[number]))
    labels = [name for _, name in sorted(zip(order, names, strict=True))] or ["all"]
    entries = (metrics.get(TRAINED + name) for name in labels)
    sizes = [0 if entry is None else int(entry.value or 0) for entry in entries]
    results = scores(items, TOP_5_FROM if TOP_5 in metrics else 2, labels, sizes)
    return {name: metric for name, metric in results.items() if decider_of(name) == "outcomes"}


def _costs(record: Record, items: Items, task: Task) -> Iterator[str]:
    """Yield what the trajectory does not cost; nothing where only the built network knows."""
    parts = [canonical(part.model_dump(mode="json")) for part in (record.cell.task, record.cell.model)]
    steps, n = record.trajectory, len(items.labels)
    with suppress(UserError):
        if (cost := _cost(*parts, task.class_count(items.labels))) is None:
            return
        dense = cost.dense()
        if len(steps) != len(dense):
            yield f"its trajectory has {len(steps)} blocks, and the model {len(dense)}"
            return
        macs, most = float(cost.macs(steps)), float(cost.macs(dense))
        for name, value in (("macs", macs), ("macs_dense", most), ("macs_ratio", macs / most)):
            yield from _difference(name, record.metrics.get(name), Metric.of(name, value, n))


def _difference(name: str, reported: Metric | None, result: Metric | None) -> Iterator[str]:
    if reported is None or result is None:
        yield f"{plain(name, 60)} is {'missing' if reported is None else 'there, and does not follow from outcomes'}"
        return
    pairs = [(reported.value, result.value), (reported.low, result.low), (reported.high, result.high)]
    equal = (reported.unit, reported.n) == (result.unit, result.n) and all(
        a is b if a is None or b is None else math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in pairs
    )
    if not equal:
        old, new = (f"{x.value!r} [{x.low!r}, {x.high!r}] {plain(x.unit, 20)} of {x.n}" for x in (reported, result))
        yield f"{plain(name, 60)} is {old}, and the rest of the record comes to {new}"


@lru_cache(maxsize=256)
def _task(part: str) -> Task | None:
    """Return the task of a cell's part in canonical JSON, or None where it does not come with this sparsebench."""
    spec = Part.model_validate_json(part)
    with suppress(UserError):  # there is none, or it has parameters of an earlier version
        return fill(_registry().task(spec.name), spec.params, f"task '{spec.name}'")
    return None


@lru_cache(maxsize=1)
def _registry() -> Registry:
    return Registry(shipped_only=True)


@lru_cache(maxsize=256)
def _cost(task: str, model: str, classes: int) -> CostModel | None:
    """Return the closed form of a network's MACs, or None where its task or model does not come with sparsebench."""
    spec, data = Part.model_validate_json(model), _task(task)
    if data is None or spec.name not in {cls.name for cls in _registry().models()}:
        return None
    return fill(_registry().model(spec.name), spec.params, f"model '{spec.name}'").cost(data, classes)
