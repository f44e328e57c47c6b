"""Cells of a submission run again here, and what came out then beside what was reported. Runs the strategy's code."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sparsebench import seeds
from sparsebench.contain.enclosure import enclose, has_sandbox, no_network
from sparsebench.engine import run as runs
from sparsebench.engine.options import Choice
from sparsebench.engine.run import Callbacks
from sparsebench.errors import UserError
from sparsebench.planning import planner
from sparsebench.planning.expand import ImageUse, code_of, training_of
from sparsebench.planning.expected import Expected
from sparsebench.planning.files import LOCATED, locate, places_of
from sparsebench.planning.job import Job
from sparsebench.planning.networks import Networks
from sparsebench.planning.planner import Plan
from sparsebench.planning.request import Files, How
from sparsebench.planning.weights import files_of
from sparsebench.plugin.content import Content, file_revision
from sparsebench.plugin.installed import distribution, entries, installed_content
from sparsebench.plugin.registry import Registry
from sparsebench.publish import agree
from sparsebench.publish import folder as folders
from sparsebench.publish.folder import Manifest
from sparsebench.publish.verify import Verdict
from sparsebench.records import manifests, store
from sparsebench.records.cell import Cell, canonical
from sparsebench.records.checks import HARMLESS
from sparsebench.records.record import Record
from sparsebench.spec import fill
from sparsebench.strategy import Kind
from sparsebench.testing import process
from sparsebench.text import plain

_BY_CONTENT = re.compile(r"-[0-9a-f]{12}$")
"""Ends the name of pictures and weights that are a user's own."""


@dataclass(frozen=True)
class Here:
    """What a submission does not say: this machine.

    Attributes:
        files: where pictures and trained weights come from.
        device: "cpu", "cuda:i" or "auto".
        seed: of the draw of cells, to repeat one; None for one that nobody can know before.
        on_stop: called at the first Ctrl-C.
    """

    files: Files
    device: str
    seed: int | None = None
    on_stop: Callable[[], None] = lambda: None


def replay(folder: Path, verdict: Verdict, number: int | None, here: Here) -> None:
    """Run cells of a reported submission again, and give it the badge `replayed` if they agree, or else say why not.

    So many are drawn, or all for None, see `_draw`, and compared, see `agree`. This process, which compares, never
    imports the strategy, which lies in the submission or is installed: only the workers do.

    Raises:
        UserError: the strategy is not here, or the device, pictures or weights are not there.
    """
    if verdict.badge != "reported":
        return
    manifest, registry = folders.manifest_of(folder), Registry(shipped_only=True)
    plugin = plugin_of(folder, manifest)
    _check_source(manifest, registry, plugin)
    seed = secrets.randbits(48) if here.seed is None else here.seed
    records, counts = _draw(folder, manifest.strategy, number, seed)
    cells = [record.cell for record in records]
    _check_files(cells, _located(cells, registry, here))
    with enclose(_readable(manifest, plugin, here)):
        if broken := _unfair(manifest, records, plugin):
            verdict.contradicted(broken)
            return
        again = _run(records, manifest, registry, plugin, here)
    adaptive = {name for (name, _), one in manifests.strategies(folder).items() if one.adaptive}
    agreement = agree.compare([(record, again[record.cell_id]) for record in records], adaptive)
    of_strategy = sum(record.cell.strategy.name == manifest.strategy for record in records)
    verdict.notes.append(
        f"replayed {len(records)} of {counts[0]} cells, {of_strategy} of its {counts[1]} own, "
        f"with --replay-seed {seed}: " + ", ".join(record.cell_id for record in records)
    )
    if agreement.elsewhere:
        verdict.notes.append(
            f"{agreement.elsewhere} of them are said to come from another machine, or not from a CPU; "
            f"accuracies agree within {agreement.points:.2f} points"
        )
    if agreement.wrong:
        verdict.contradicted(agreement.wrong)
    else:
        verdict.badge = "replayed"


def plugin_of(folder: Path, manifest: Manifest) -> Path | None:
    """Return the strategy's file in a submission, or None where it is installed or shipped."""
    return (folder / folders.PLUGIN / manifest.file).absolute() if manifest.file else None


def _check_source(manifest: Manifest, registry: Registry, plugin: Path | None) -> None:
    """Raise UserError unless the strategy is here, as it was published; its code is not run."""
    name, origin = manifest.strategy, manifest.plugin
    if plugin is not None:
        if (here := file_revision(plugin)) != origin.revision:
            raise UserError(f"the file of '{name}' is not the one that was run", got=here, allowed=origin.revision)
        return
    known = entries().get(origin.plugin)
    found = distribution(known) if known else ("", "")
    if found[0] != origin.distribution or (found != (origin.distribution, origin.version) and not origin.is_shipped):
        raise UserError(
            f"strategy '{name}' is not here as it was run", got=" ".join(found).strip() or "none that is installed",
            allowed=f"{origin.distribution} {origin.version}", next_step="install that, and give the command again",
        )  # fmt: skip
    if origin.is_shipped and (here := registry.strategy(name).origin.revision) != origin.revision:
        raise UserError(f"'{name}' has another revision here", got=here, allowed=origin.revision,
                        next_step="install the sparsebench that was run")  # fmt: skip


def _unfair(manifest: Manifest, records: Sequence[Record], plugin: Path | None) -> list[str]:
    """Return which required checks the strategy fails, with the parameters of the cells that are run again."""
    name = manifest.strategy
    params = {
        canonical(r.cell.strategy.params): r.cell.strategy.params for r in records if r.cell.strategy.name == name
    }
    given = {name: [params[key] for key in sorted(params)]}
    reports = process.check(str(plugin) if plugin else name, given=given, groups=("required",))
    return [
        f"{plain(report.label, 60)} does not conform: check {plain(one.check, 60)} {one.status}: {plain(one.message)}"
        for report in reports
        for one in report.outcomes
        if one.status not in HARMLESS
    ]


def announcement(folder: Path) -> str:
    """Return what a replay of a submission is going to run, in one line."""
    manifest = folders.manifest_of(folder)
    plugin = plugin_of(folder, manifest)
    what = f"the file {plain(plugin)}" if plugin else f"the installed plugin of '{plain(manifest.strategy, 60)}'"
    if has_sandbox():
        return f"this runs {what} as you, without network, in a sandbox that hides your home and writes nothing there"
    network = "without network" if no_network() else "WITH your network, as this system has no `unshare`"
    return f"this runs {what} as you, {network}, with your files, as `bwrap` does not work here"


def _readable(manifest: Manifest, plugin: Path | None, here: Here) -> list[Path]:
    """Return the files that cells need: the plugin's, and those of the pictures and weights that were named."""
    content = Content.of_file(plugin) if plugin else installed_content(manifest.plugin.plugin)
    named = (here.files.images, here.files.backgrounds, here.files.pretrain_images)
    paths = [Path(name.removeprefix("folder:")) for name in named if name]
    paths += [path for path in (here.files.data_root or Path("data"), here.files.networks) if path]
    paths += files_of(here.files.weights)
    return [path.absolute() for path in (*paths, *(content.hashes if content else ()))]


def _draw(folder: Path, strategy: str, number: int | None, seed: int) -> tuple[list[Record], tuple[int, int]]:
    """Return so many of the records that are ok, or all for None, and how many there are, and how many of its own.

    At least half are of the strategy's own cells, as far as there are so many, and both halves go round the tasks. The
    draw hangs on the cells and on a seed that the submission cannot know: no other content of the records moves it.
    """
    records = {record.cell_id: record for record in folders.read_records(folder) if record.status == "ok"}
    of_strategy: dict[str, list[tuple[int, str]]] = {}
    other: dict[str, list[tuple[int, str]]] = {}
    for cell_id, record in records.items():
        cells = of_strategy if record.cell.strategy.name == strategy else other
        key = seeds.seed_of("replay", str(seed), cell_id), cell_id
        cells.setdefault(record.cell.task.name, []).append(key)
    first, second = _round(of_strategy), _round(other)
    total = len(first) + len(second)
    most = total if number is None else min(number, total)
    others = min(most // 2, len(second))
    chosen = {*first[: most - others], *second[: max(others, most - len(first))]}
    return [record for cell_id, record in records.items() if cell_id in chosen], (total, len(first))


def _round(cells: dict[str, list[tuple[int, str]]]) -> list[str]:
    """Return cells in the order of their keys, one of each task after the other."""
    placed = [(place, key) for keys in cells.values() for place, key in enumerate(sorted(keys))]
    return [cell_id for _, (_, cell_id) in sorted(placed)]


def _run(
    records: Sequence[Record], manifest: Manifest, registry: Registry, plugin: Path | None, here: Here
) -> dict[str, Record]:
    """Return the records of cells that are run again, by their ids, with those that they start from."""
    how = How(here.device, jobs=1, checkpoint=0.0)
    choice = Choice.of(how)
    jobs: dict[str, Job] = {}
    for record in records:
        job = _job(record, manifest, registry, plugin)
        training = _training(record.cell, registry)
        for init in (*record.cell.inits, *([training] if training else [])):
            jobs[init.id] = _first(init, registry).model_copy(update={"keep_weights": True})
        if training is not None:
            job = job.model_copy(update={"after": training.id, "network": training.id})
        jobs.setdefault(record.cell_id, job)
    with tempfile.TemporaryDirectory(prefix="sparsebench-replay-") as out:
        networks = Networks(Path(out), {}, here.files.networks)
        asked = {record.cell_id for record in records}
        needed = planner.needed_by(asked, list(jobs.values()), lambda first: not networks.has(first))
        ordered = sorted((job for cell_id, job in jobs.items() if cell_id in asked | needed), key=lambda job: job.order)
        places = places_of(here.files, ordered, _located([job.cell for job in ordered], registry, here))
        places |= networks.places({job.after for job in ordered} - {""})
        plan = Plan(ordered, ordered, places, ordered, known={}, expected=Expected(()), request=None)
        runs.carry_out(plan, how, choice, registry, Path(out), Callbacks(on_stop=here.on_stop))
        return dict(store.read(Path(out)))


def _located(cells: Sequence[Cell], registry: Registry, here: Here) -> dict[str, Path]:
    """Return where the files lie that were named for the cells, by their names in cells."""
    uses: set[ImageUse] = {"images" if registry.task(cell.task.name).trains else "tested_images" for cell in cells}
    return locate(here.files, sorted(uses))[1]


def _check_files(cells: Sequence[Cell], places: Mapping[str, Path]) -> None:
    """Raise UserError if pictures or weights are not here that cells name by what is in them."""
    for cell in cells:
        named = {key: cell.task.params.get(key) for key in LOCATED} | {"weights": cell.model.params.get("weights")}
        for key, name in named.items():
            if isinstance(name, str) and _BY_CONTENT.search(name) and name not in places:
                given = sorted(place for place in places if place.partition("-")[0] == name.partition("-")[0])
                raise UserError(
                    f"cell {cell.id} was run with {plain(name, 60)}", got=", ".join(given) or "none that is named so",
                    next_step=f"give what it was run with by --{key.replace('_', '-')}",
                )  # fmt: skip


def _job(record: Record, manifest: Manifest, registry: Registry, plugin: Path | None) -> Job:
    """Return the job of a record's cell; of the strategy's own without its code, which the worker checks it against."""
    cell, strategy = record.cell, manifest.strategy
    if cell.strategy.name != strategy or (plugin is None and strategy in registry.entries):
        return _first(cell, registry)
    source = manifest.plugin
    return Job(
        cell=cell, origin=source, kind=cast(Kind, record.kind), label=strategy, after=cell.init.id if cell.init else "",
        files=() if plugin is None else (str(plugin.resolve()),), strangers=(f"{source.plugin} {source.revision}",),
    )  # fmt: skip


def _first(cell: Cell, registry: Registry) -> Job:
    registered = registry.strategy(cell.strategy.name)
    return Job(
        cell=cell, origin=registered.origin, kind=registered.cls.kind, label=cell.strategy.name,
        failure=registered.failure, after=cell.init.id if cell.init else "", **code_of(cell, registry),
    )  # fmt: skip


def _training(cell: Cell, registry: Registry) -> Cell | None:
    if cell.track == "frozen":
        return cell.init
    task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
    model = fill(registry.model(cell.model.name), cell.model.params, f"model '{cell.model.name}'")
    return training_of(cell, task, model, registry)
