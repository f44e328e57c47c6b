"""Replays: run cells of a submission again, which runs the strategy's code, and compare them with the reported records.

`agreement` has the rules of the comparison.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sparsebench.errors import UserError, few, plain
from sparsebench.plan import plan as planner
from sparsebench.plan.forecast import Forecast
from sparsebench.plan.jobs import Job, JobMaker, plugins_of
from sparsebench.plan.locate import Located, Networks, files_of, locate, official_places, places_of_transformers
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files
from sparsebench.plugin.content import Content
from sparsebench.plugin.registry import Registry, distribution, entries
from sparsebench.plugin.registry import files_of as plugin_files
from sparsebench.publish.agreement import compare, draw
from sparsebench.publish.replays import Replay, write
from sparsebench.publish.submission import (
    ALONE,
    Manifest,
    Verdict,
    is_own,
    lacking,
    manifest_of,
    plugin_of,
    read_records,
)
from sparsebench.records import manifests, store
from sparsebench.records.record import ON_TRAINED, Cell, Record, canonical
from sparsebench.records.reports import HARMLESS
from sparsebench.runner import run as runs
from sparsebench.runner.process import launched_by
from sparsebench.runner.progress import Callbacks
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.sources.composites import LOCATED
from sparsebench.testing import process

_BY_CONTENT = re.compile(r"-[0-9a-f]{12}$")
"""End of the names of the user's own pictures and weights: a hash of the content."""
KEPT = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|PYTHON(PATH|HOME|HASHSEED|WARNINGS)|VIRTUAL_ENV"
    r"|(CUDA|CUBLAS|NVIDIA|OMP|MKL|OPENBLAS|ATEN|TORCH|NUMBA|MPL)\w*|XDG_CACHE_HOME|HF_HOME|SPARSEBENCH_\w+"
)
"""Environment variables that libraries need. Other variables may contain a token or a password."""


@dataclass(frozen=True)
class _Source:
    """What cells of a submission are run again from.

    Attributes:
        manifest: of the submission.
        plugin: the file of its strategy, if it has one.
        registry: what comes with sparsebench.
        files: pictures and trained weights on this machine.
    """

    manifest: Manifest
    plugin: Path | None
    registry: Registry
    files: Files


def replay(
    folder: Path,
    verdict: Verdict,
    number: int | None,
    files: Files,
    device: str,
    seed: int | None = None,
    on_stop: Callable[[], None] = lambda: None,
    by: str = "",
) -> None:
    """Run cells of a reported submission again. Set the badge `replayed` if they agree, otherwise the reasons.

    Only worker processes import the strategy. This process compares the results and never imports the strategy.

    Args:
        folder: folder of the submission.
        verdict: verdict of `verify`; updated in place.
        number: number of cells to draw, see `agreement.draw`; None for all cells.
        files: pictures and trained weights on this machine.
        device: "cpu", "cuda:i" or "auto".
        seed: seed of the draw, to repeat an earlier draw; None for an unpredictable seed.
        on_stop: called at the first Ctrl-C.
        by: who replays. If given and the cells agree, the replay is written beside the submission, see `replays`.

    Raises:
        UserError: if the strategy, the device, pictures or weights are missing on this machine, or if the submission
            lacks the plugin of a drawn cell's task or model.
    """
    if verdict.wrong:
        return
    verdict.badge, verdict.replays = "reported", []  # those of its files; this replay decides
    manifest = manifest_of(folder)
    source = _Source(manifest, plugin_of(folder, manifest), Registry(shipped_only=True), files)
    if source.plugin is None:
        _check_source(source)
    seed = secrets.randbits(48) if seed is None else seed
    results = [record for record in read_records(folder) if record.status == "ok"]
    records = draw(results, manifest.strategy, number, seed)
    _check_inputs([record.cell for record in records], source)

    with enclose(_input_files(source)):
        broken = _check_failures(source, records)
        if broken:
            verdict.settle(broken, "replayed")
            return
        replayed, machines = _run(records, source, device, on_stop)

    again = [replayed[record.cell_id] for record in records]
    wrong, elsewhere, points = compare(list(zip(records, again, strict=True)), _adaptive(folder))
    verdict.notes.append(_about_draw(records, results, manifest.strategy, seed))
    if elsewhere:
        verdict.notes.append(
            f"according to the submission {elsewhere} of them ran on another machine or not on a CPU; "
            f"accuracies agree within {points:.2f} points"
        )
    verdict.settle(wrong, "replayed")
    if wrong:
        return
    if by:
        content = Replay.of(again, by=by, records=manifest.records, seed=seed, number=number, machines=machines)
        verdict.notes.append(f"written: {write(folder, content)}")
    else:
        verdict.notes.append("boards do not show this replay: --by NAME keeps it beside the submission")


def _adaptive(folder: Path) -> set[str]:
    """Return the names of the adaptive strategies of a submission."""
    return {name for (name, _), strategy in manifests.strategies(folder).items() if strategy.adaptive}


def _about_draw(records: Sequence[Record], results: Sequence[Record], strategy: str, seed: int) -> str:
    """Return a line on the records that were drawn from the results, and how to draw them again."""
    n_drawn = sum(record.cell.strategy.name == strategy for record in records)
    n_results = sum(record.cell.strategy.name == strategy for record in results)
    return (
        f"replayed {len(records)} of {len(results)} cells ({n_drawn} of {n_results} cells of the strategy), "
        f"with --replay-seed {seed}: " + ", ".join(record.cell_id for record in records)
    )


def _check_inputs(cells: Sequence[Cell], source: _Source) -> None:
    """Raise UserError if the submission or this machine lacks what the cells need."""
    missing = lacking(cells, source.manifest.plugin)
    if missing:
        what = f"cells of {few(missing)} cannot be replayed: {ALONE}"
        raise UserError(what, next_step="verify the submission without --replay")
    _locate(cells, source)


def _check_source(source: _Source) -> None:
    """Raise UserError unless the published distribution of the strategy is installed. Does not run its code."""
    name, origin = source.manifest.strategy, source.manifest.plugin
    entry = entries().get(origin.plugin)
    package, version = distribution(entry.dist) if entry else ("", "")
    got = f"{package} {version}".strip()
    allowed = f"{origin.distribution} {origin.version}".strip()
    if origin.is_shipped and package == origin.distribution:  # its revision matters, not the version of sparsebench
        got = f"revision {source.registry.strategy(name).origin.revision}"
        allowed = f"revision {origin.revision}"
    if got != allowed:
        raise UserError(
            f"the published version of strategy '{name}' is not installed",
            got=got or "no installed strategy",
            allowed=allowed,
            next_step="install it and run the command again",
        )


def _check_failures(source: _Source, records: Sequence[Record]) -> list[str]:
    """Return the required checks that the strategy fails with the parameters of the drawn cells."""
    name = source.manifest.strategy
    parts = (record.cell.strategy for record in records if record.cell.strategy.name == name)
    settings = {canonical(part.params): part for part in parts}
    target = str(source.plugin) if source.plugin else name
    failures = []
    for part in settings.values():
        for report in process.check(target, part=part, groups=("required",)):
            conforms = f"{plain(report.label, 60)} does not conform"
            for outcome in report.outcomes:
                if outcome.status not in HARMLESS:
                    check = f"check {plain(outcome.check, 60)} {outcome.status}"
                    failures.append(f"{conforms}: {check}: {plain(outcome.message)}")
    return failures


def _input_files(source: _Source) -> list[Path]:
    """Return the files that the cells need: those of the plugin, the pictures and the weights."""
    files = source.files
    names = (*files.images, files.backgrounds, files.pretrain_images)
    paths = [Path(name.removeprefix("folder:")) for name in names if name]
    paths += [path for path in (files.data_root or Path("data"), files.networks) if path]
    of_transformers = places_of_transformers(files).values()
    paths += of_transformers
    paths += files_of([path for path in files.weights if path.expanduser() not in of_transformers])
    return [path.absolute() for path in (*paths, *_code_of(source))]


def _code_of(source: _Source) -> Collection[Path]:
    """Return the files of the strategy's code, or the folders of the installed one."""
    if source.plugin:
        return Content.of_file(source.plugin, alone=True).paths
    entry = entries().get(source.manifest.plugin.plugin)
    return {path.parent for path in plugin_files(entry)} if entry else ()


def _run(
    records: Sequence[Record], source: _Source, device: str, on_stop: Callable[[], None]
) -> tuple[dict[str, Record], dict[str, dict[str, str]]]:
    """Run cells again, including the cells that they start from.

    Returns:
        The new records by cell id, and their machines with libraries by hash.
    """
    options = Execution(device, jobs=1, checkpoint=0.0)
    jobs: dict[str, Job] = {}
    for record in records:
        _add_jobs(jobs, record, source)
    with tempfile.TemporaryDirectory(prefix="sparsebench-replay-") as out:
        networks = Networks(Path(out), {}, source.files.networks)
        ids = {record.cell_id for record in records}
        starts = planner.prerequisites(ids, list(jobs.values()), lambda first: not networks.has(first))
        queue = sorted((job for cell_id, job in jobs.items() if cell_id in ids | starts), key=lambda job: job.order)
        located = _locate([job.cell for job in queue], source)
        plan = Plan(
            jobs=queue,
            todo=queue,
            located=located,
            locations=_places(queue, located, networks, source.files),
            whole=queue,
            summaries={},
            forecast=Forecast(queue),
            request=None,
            device=runs.device_of(options),
        )
        runs.carry_out(plan, options, source.registry, Path(out), Callbacks(on_stop=on_stop))
        opened = store.Store(Path(out))
        replayed = opened.records()
        machines = opened.values(manifests.ENVIRONMENTS, dict[str, str])
        return replayed, {Path(name).stem: machine for name, machine in machines.items()}


def _places(queue: Sequence[Job], located: Located, networks: Networks, files: Files) -> dict[str, Path]:
    """Return the files on this machine by the names that cells have for them: pictures, weights and networks."""
    places = dict(located.places) | official_places(files, queue, located.places)
    places |= networks.places({job.after for job in queue} - {""})
    for job in queue:
        task = job.cell.task
        if task.name == Folder.name and task.params.get("train"):
            # The training pictures of a probe, beside those of the test.
            places |= Folder.model_validate(task.params).for_probe(places, files.skip_bad)[1]
    return places


def _add_jobs(jobs: dict[str, Job], record: Record, source: _Source) -> None:
    """Add the jobs of a record's cell and of the cells that it starts from, by cell id.

    A cell tests the network of another cell if its track is in ON_TRAINED, or if its strategy acts in the test only.
    A cell of the strategy's own file trains its network itself, as this process does not import the file.
    """
    cell = record.cell
    trained = None
    if cell.track in ON_TRAINED:
        trained = cell.init
    elif not is_own(cell, source.manifest.plugin):
        resolved = JobMaker(source.registry).training_of(source.registry.resolve(cell))
        trained = resolved.cell if resolved else None

    for start in (*cell.inits, *([trained] if trained else [])):
        job = _job(start, record, source)
        jobs[start.id] = job.model_copy(update={"keep_weights": True})
    job = _job(cell, record, source)
    if trained is not None:
        job = job.model_copy(update={"after": trained.id, "network": trained.id})
    jobs.setdefault(record.cell_id, job)


def _locate(cells: Sequence[Cell], source: _Source) -> Located:
    """Locate the files of the cells on this machine.

    The submission's file is not imported here. A task in it is given the pictures that tasks of sparsebench can have.

    Raises:
        UserError: if pictures or weights are missing that cells identify by content.
    """
    plugin = source.manifest.plugin
    of_file = {"composite" if cell.n_train else "folder" for cell in cells if is_own(cell, plugin)}
    names = of_file | {cell.task.name for cell in cells if not is_own(cell, plugin)}
    files = source.files
    of_transformers = places_of_transformers(files)
    of_timm = tuple(path for path in files.weights if path.expanduser() not in of_transformers.values())
    tasks = [source.registry.task(name) for name in sorted(names)]
    located = locate(replace(files, weights=of_timm), tasks)
    located = replace(located, places={**located.places, **of_transformers})
    for cell in cells:
        parts = {key: cell.task.params.get(key) for key in LOCATED}
        parts |= {key: cell.model.params.get(key) for key in ("weights", "text_features")}
        for key, name in parts.items():
            if isinstance(name, str) and _BY_CONTENT.search(name) and name not in located.places:
                kind = name.partition("-")[0]
                others = sorted(place for place in located.places if place.partition("-")[0] == kind)
                raise UserError(
                    f"cell {cell.id} was run with {plain(name, 60)}",
                    got=", ".join(others) or "no such file or folder",
                    next_step=f"give the file or folder of the run with --{key.replace('_', '-')}",
                )
        classes = cell.task.params.get("classes")
        if cell.task.name == Folder.name and classes and classes not in located.places:
            raise UserError(
                f"cell {cell.id} cannot be replayed: its classes are those of a file, and a replay takes no such file",
                next_step="verify the submission without --replay",
            )
    return located


def _job(cell: Cell, record: Record, source: _Source) -> Job:
    """Return the job of a record's cell, or of a cell that it starts from.

    Unless the published strategy comes with sparsebench, only the worker process loads its code, and checks that the
    code has the revision in the record. The same holds for a task or a model in its file.
    """
    name = cell.strategy.name
    origin = source.manifest.plugin
    is_shipped = source.plugin is None and name in source.registry.entries
    if name == source.manifest.strategy and not is_shipped:
        of_strategy = {"origin": origin, "kind": record.kind}
        is_in_file = True
    else:
        entry = source.registry.strategy(name)
        of_strategy = {"origin": entry.origin, "kind": entry.cls.kind}
        is_in_file = is_own(cell, origin)

    plugins: dict[str, tuple[str, ...]]
    if is_in_file:
        files = () if source.plugin is None else (str(source.plugin.resolve()),)
        plugins = {"files": files, "code": (f"{origin.plugin} {origin.revision}", name)}
    else:
        plugins = plugins_of(cell, source.registry)
    return Job(cell=cell, label=name, after=cell.init.id if cell.init else "", **of_strategy, **plugins)


def _starts(command: Sequence[str]) -> bool:
    """Return whether a command can start Python. Many containers do not permit `bwrap` or `unshare`."""
    python = [*command, sys.executable, "-c", ""]
    return not subprocess.run(python, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode


@cache
def no_network() -> tuple[str, ...]:
    """Return the command that runs another command without network; empty if it does not work on this system."""
    command = "unshare", "--map-root-user", "--net"
    return command if shutil.which("unshare") and _starts(command) else ()


@cache
def has_sandbox() -> bool:
    """Return whether `bwrap` works on this system."""
    with tempfile.TemporaryDirectory() as room:
        return shutil.which("bwrap") is not None and _starts(_sandbox((), Path(room)))


def _sandbox(readable: Iterable[Path], room: Path) -> list[str]:
    """Return the command that runs another command without network and with write access only to `room`.

    The user's home and temporary files are hidden, except the `readable` paths, caches of weights, and the files of
    Python.
    """
    folders = [Path.home().resolve(), *(Path(name).resolve() for name in ("/tmp", "/var/tmp", "/run", room.parent))]
    python = map(Path, (sys.prefix, sys.base_prefix, *filter(None, sys.path)))
    caches = (Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"), "hub"), Path.home() / ".cache/torch")
    paths = {os.path.abspath(path) for path in (*python, *caches, *readable)}
    tmpfs = [part for path in dict.fromkeys(folders) if path.is_dir() for part in ("--tmpfs", str(path))]
    # Binding a parent of a hidden folder would make the folder visible again.
    paths = {path for path in paths if not any(folder.is_relative_to(path) for folder in folders)}
    binds = [part for path in sorted(paths) for part in ("--ro-bind-try", path, path)]
    return [
        "bwrap",
        "--unshare-net",
        "--unshare-pid",
        "--unshare-ipc",
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        "--ro-bind",
        "/",
        "/",
        "--dev-bind",
        "/dev",
        "/dev",
        "--proc",
        "/proc",
        *tmpfs,
        *binds,
        "--bind",
        str(room),
        str(room),
        "--dir",
        os.getcwd(),
        "--chdir",
        os.getcwd(),
    ]


@contextmanager
def enclose(readable: Iterable[Path] = ()) -> Iterator[None]:
    """Restrict the worker processes that start within this context: no network, and only environment variables in KEPT.

    With `bwrap` they also read only the `readable` files, Python and its libraries, and write only temporary files.

    Args:
        readable: files and folders that the worker processes need besides Python and its libraries.
    """
    before, place = dict(os.environ), tempfile.tempdir
    for name in before:
        if not KEPT.fullmatch(name):
            del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="sparsebench-") as folder:
        room = Path(folder).resolve()
        os.environ["TMPDIR"] = tempfile.tempdir = str(room)
        try:
            with launched_by(_sandbox(readable, room) if has_sandbox() else no_network()):
                yield
        finally:
            tempfile.tempdir = place
            os.environ.pop("TMPDIR")
            os.environ.update(before)
