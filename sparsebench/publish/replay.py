"""Cells of a submission run again here, and whether they agree with what was reported. Runs the strategy's code.

On the same machine and libraries, and a CPU, everything is the same. Elsewhere sums are rounded otherwise, which
training makes large. That it was elsewhere is the submission's claim, so it buys little: what may not hang on rounding
must be the same, and all drawn cells of a task together may not be significantly better than they are here, nor by more
than `MOST_BETTER`. No level is divided by the number of cells: to ask for more of them lets no more through.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from sparsebench import seeds
from sparsebench.errors import UserError, plain
from sparsebench.plan import plan as planner
from sparsebench.plan.expand import plugins_of, training_of
from sparsebench.plan.locate import LOCATED, Networks, files_of, networks_of, pictures_for, places_of
from sparsebench.plan.plan import Expected, Plan
from sparsebench.plan.request import Execution, Files, Job
from sparsebench.plugin.content import Content
from sparsebench.plugin.registry import Registry, distribution, entries
from sparsebench.plugin.registry import files_of as plugin_files
from sparsebench.publish.submission import Manifest, Verdict, cell_name, items_of, manifest_of, plugin_of, read_records
from sparsebench.records import manifests, store
from sparsebench.records.record import Cell, Record, canonical
from sparsebench.runner import run as runs
from sparsebench.runner.process import PREFIX
from sparsebench.runner.progress import Callbacks
from sparsebench.stats.paired import mcnemar
from sparsebench.strategy.spec import fill
from sparsebench.testing import process
from sparsebench.testing.reports import HARMLESS

_BY_CONTENT = re.compile(r"-[0-9a-f]{12}$")
"""Ends the name of pictures and weights that are a user's own."""
KEPT = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|PYTHON(PATH|HOME|HASHSEED|WARNINGS)|VIRTUAL_ENV"
    r"|(CUDA|CUBLAS|NVIDIA|OMP|MKL|OPENBLAS|ATEN|TORCH|NUMBA|MPL)\w*|XDG_CACHE_HOME|HF_HOME|SPARSEBENCH_\w+"
)
"""Variables that libraries need; what else there is may be a token or a password."""
FALSE_ALARM = 0.01
"""Chance of a task's one-sided test to find that sound cells of another machine are better than those here."""
SLACK, MOST_BETTER = 0.005, 0.05
"""Share of a task's test items that may be better than here whatever the test says, and that may not; of few items, n,
the latter is 1 / sqrt(n)."""
AGREEING = 0.99
"""Share of the test items that weights which are not trained must class alike: nothing but rounding differs."""
FEW = 0.02
"""Difference of token counts, as a share, that rounding may make where images keep numbers of tokens of their own."""
MEANS = {"test_loss": -1, "p_label": 1, "success": 1, "success_loss": 1}
"""Metrics that hang on losses, which records do not have item by item, and in which direction they are better."""
BETTER = 0.1
"""Share by which the mean of one over a task's cells may be better than here; of successes, share of the cells."""


def replay(
    folder: Path, verdict: Verdict, number: int | None, files: Files, device: str, seed: int | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Run cells of a reported submission again, and give it the badge `replayed` if they agree, or else say why not.

    This process, which compares, never imports the strategy, which lies in the submission or is installed: only the
    workers do.

    Args:
        folder, verdict: the submission's.
        number: how many cells are drawn, see `_draw`; None for all.
        files: where pictures and trained weights come from here.
        device: "cpu", "cuda:i" or "auto".
        seed: of the draw, to repeat one; None for one that nobody can know before.
        on_stop: called at the first Ctrl-C.

    Raises:
        UserError: the strategy is not here, or the device, pictures or weights are not there.
    """
    if verdict.badge != "reported":
        return
    manifest, registry = manifest_of(folder), Registry(shipped_only=True)
    plugin = plugin_of(folder, manifest)
    if plugin is None:
        _check_source(manifest, registry)
    seed = secrets.randbits(48) if seed is None else seed
    results = [record for record in read_records(folder) if record.status == "ok"]
    records = _draw(results, manifest.strategy, number, seed)
    _locate([record.cell for record in records], registry, files)
    with enclose(_input_files(manifest, plugin, files)):
        if broken := _check_failures(manifest, records, plugin):
            return verdict.settle(broken, "replayed")
        again = _run(records, manifest, registry, plugin, files, device, on_stop)
    adaptive = {name for (name, _), strategy in manifests.strategies(folder).items() if strategy.adaptive}
    wrong, elsewhere, points = compare([(record, again[record.cell_id]) for record in records], adaptive)
    n, total = (sum(x.cell.strategy.name == manifest.strategy for x in part) for part in (records, results))
    verdict.notes.append(
        f"replayed {len(records)} of {len(results)} cells, {n} of its {total} own, "
        f"with --replay-seed {seed}: " + ", ".join(record.cell_id for record in records)
    )
    if elsewhere:
        verdict.notes.append(
            f"{elsewhere} of them are said to come from another machine, or not from a CPU; "
            f"accuracies agree within {points:.2f} points"
        )
    verdict.settle(wrong, "replayed")


def _check_source(manifest: Manifest, registry: Registry) -> None:
    """Raise UserError unless an installed strategy is here as it was published; its code is not run."""
    name, origin, entry = manifest.strategy, manifest.plugin, entries().get(manifest.plugin.plugin)
    here, version = distribution(entry.dist) if entry else ("", "")
    got, allowed = (f"{x[0]} {x[1]}".strip() for x in ((here, version), (origin.distribution, origin.version)))
    if origin.is_shipped and here == origin.distribution:  # whose version does not matter
        got, allowed = (f"revision {source.revision}" for source in (registry.strategy(name).origin, origin))
    if got != allowed:
        raise UserError(
            f"strategy '{name}' is not here as it was run", got=got or "none that is installed", allowed=allowed,
            next_step="install that, and give the command again",
        )  # fmt: skip


def _check_failures(manifest: Manifest, records: Sequence[Record], plugin: Path | None) -> list[str]:
    """Return which required checks the strategy fails, with the parameters of the cells that are run again."""
    name = manifest.strategy
    parts = (record.cell.strategy for record in records if record.cell.strategy.name == name)
    settings = {canonical(part.params): part for part in parts}
    target = str(plugin) if plugin else name
    return [
        f"{plain(report.label, 60)} does not conform: check {plain(x.check, 60)} {x.status}: {plain(x.message)}"
        for part in settings.values()
        for report in process.check(target, part=part, groups=("required",))
        for x in report.outcomes
        if x.status not in HARMLESS
    ]


def _input_files(manifest: Manifest, plugin: Path | None, files: Files) -> list[Path]:
    """Return the files that cells need: the plugin's, and those of the pictures and weights that were named."""
    entry = entries().get(manifest.plugin.plugin)
    code = Content.of_file(plugin).files if plugin else {path.parent for path in plugin_files(entry)} if entry else ()
    names = (*files.images, files.backgrounds, files.pretrain_images)
    paths = [Path(name.removeprefix("folder:")) for name in names if name]
    paths += [path for path in (files.data_root or Path("data"), files.networks) if path]
    paths += files_of(files.weights)
    return [path.absolute() for path in (*paths, *code)]


def _draw(records: Sequence[Record], strategy: str, number: int | None, seed: int) -> list[Record]:
    """Return so many of the records, or all for None: in turn one of the strategy's own and another, as there are some.

    Both go round the tasks. The draw hangs on the cells and on a seed that the submission cannot know: no other content
    of the records moves it.
    """

    def in_turn(groups: Iterable[Iterable[Record]]) -> Iterator[Record]:
        return filter(None, chain.from_iterable(zip_longest(*groups)))

    by_task = {True: defaultdict[str, list[Record]](list), False: defaultdict[str, list[Record]](list)}
    for record in sorted(records, key=lambda record: seeds.seed_of("replay", str(seed), record.cell_id)):
        by_task[record.cell.strategy.name == strategy][record.cell.task.name].append(record)
    return list(in_turn(in_turn(tasks.values()) for tasks in by_task.values()))[:number]


def _run(
    records: Sequence[Record], manifest: Manifest, registry: Registry, plugin: Path | None, files: Files, device: str,
    on_stop: Callable[[], None],
) -> dict[str, Record]:  # fmt: skip
    """Return the records of cells that are run again, by their ids, with those that they start from."""
    options = Execution(device, jobs=1, checkpoint=0.0)
    jobs: dict[str, Job] = {}
    for record in records:
        job, cell = _job(record.cell, record, manifest, registry, plugin), record.cell
        training = cell.init
        if cell.track != "frozen":
            task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
            model = fill(registry.model(cell.model.name), cell.model.params, f"model '{cell.model.name}'")
            training = training_of(cell, task, model, registry)
        for init in (*cell.inits, *([training] if training else [])):
            jobs[init.id] = _job(init, record, manifest, registry, plugin).model_copy(update={"keep_weights": True})
        if training is not None:
            job = job.model_copy(update={"after": training.id, "network": training.id})
        jobs.setdefault(record.cell_id, job)
    with tempfile.TemporaryDirectory(prefix="sparsebench-replay-") as out:
        networks = Networks(Path(out), {}, files.networks)
        ids = {record.cell_id for record in records}
        starts = planner.prerequisites(ids, list(jobs.values()), lambda first: not networks.has(first))
        queue = sorted((job for cell_id, job in jobs.items() if cell_id in ids | starts), key=lambda job: job.order)
        _locate([job.cell for job in queue], registry, files)
        places = places_of(files, queue) | networks.places({job.after for job in queue} - {""})
        plan = Plan(queue, queue, places, queue, heads={}, expected=Expected(queue), request=None)
        runs.carry_out(plan, options, registry, Path(out), Callbacks(on_stop=on_stop))
        return dict(store.read(Path(out)))


def _locate(cells: Sequence[Cell], registry: Registry, files: Files) -> None:
    """Find the files that were named for the cells.

    Raises:
        UserError: pictures or weights are not here that cells name by what is in them.
    """
    networks_of(files)
    for task in sorted({cell.task.name for cell in cells}):
        pictures_for(registry.task(task), files)
    for cell in cells:
        parts = {key: cell.task.params.get(key) for key in LOCATED} | {"weights": cell.model.params.get("weights")}
        for key, name in parts.items():
            if isinstance(name, str) and _BY_CONTENT.search(name) and name not in files.places:
                names = sorted(place for place in files.places if place.partition("-")[0] == name.partition("-")[0])
                raise UserError(
                    f"cell {cell.id} was run with {plain(name, 60)}", got=", ".join(names) or "none that is named so",
                    next_step=f"give what it was run with by --{key.replace('_', '-')}",
                )  # fmt: skip


def _job(cell: Cell, record: Record, manifest: Manifest, registry: Registry, plugin: Path | None) -> Job:
    """Return the job of a record's cell, or of one that it starts from.

    The published strategy's has none of its code unless it came with sparsebench: the worker loads it, and checks that
    it is what the record says.
    """
    name, source = cell.strategy.name, manifest.plugin
    job = partial(Job, cell=cell, label=name, after=cell.init.id if cell.init else "")
    if name == manifest.strategy and (plugin is not None or name not in registry.entries):
        files = () if plugin is None else (str(plugin.resolve()),)
        return job(origin=source, kind=record.kind, files=files, code=(f"{source.plugin} {source.revision}",))
    entry = registry.strategy(name)
    return job(origin=entry.origin, kind=entry.cls.kind, **plugins_of(cell, registry))


Pair = tuple[Record, Record]


def compare(pairs: Sequence[Pair], adaptive: Collection[str]) -> tuple[list[str], int, float]:
    """Return how records agree with those of the same cells that were made here.

    That is where they do not; how many are said to come from another machine, or not from a CPU; and by how much the
    accuracies of these agree, in percentage points, the worst of all tasks.

    Args:
        pairs: as reported, and as made here.
        adaptive: names of the strategies that keep numbers of tokens which hang on the images.
    """
    wrong: list[str] = []
    tasks: dict[tuple[str, str], list[Pair]] = {}
    for before, after in pairs:
        exact = before.environment == after.environment and before.device == after.device == "cpu"
        if odd := _deviation(before, after, exact, FEW if before.cell.strategy.name in adaptive else 0.0):
            wrong.append(f"{cell_name(before)} {odd}")
        elif not exact:
            tasks.setdefault((before.cell.task.name, before.label), []).append((before, after))
    points = 0.0
    for (task, label), group in sorted(tasks.items()):
        old, new = (np.concatenate([items_of(pair[k]).correct for pair in group]) for k in (0, 1))
        points = max(points, 100 * abs(float(old.mean() - new.mean())))
        wrong += [f"{plain(label, 60)} on {plain(task, 40)}: {text}" for text in _gains(group, old, new)]
    return wrong, sum(map(len, tasks.values())), points


def _deviation(before: Record, after: Record, exact: bool, slack: float) -> str:
    """Return how a cell came out otherwise in what hangs on no rounding, or in anything if `exact`; or ""."""
    if after.status != "ok" or before.outcomes is None or after.outcomes is None:
        return f"is {after.status} here: {plain(after.failure.reason) if after.failure else ''}"
    if before.kind != after.kind:
        return f"is {before.kind} there and {after.kind} here"
    for name in ("label", "group", "foreground"):
        if getattr(before.outcomes, name) != getattr(after.outcomes, name):
            return f"has test items with other {name}s here"
    if exact:
        means = [name for name in MEANS if name in before.metrics]  # earlier versions had fewer
        old, new = ([record.metrics.get(name) for name in means] for record in (before, after))
        whole = old == new and before.trajectory == after.trajectory and before.outcomes == after.outcomes
        return "" if whole else "has other outcomes here, on the same machine and libraries"
    names = ("tokens_in", "tokens_out", "own", "rested")
    first, second = ([[getattr(step, x) for x in names] for step in record.trajectory] for record in (before, after))
    near = slack and len(first) == len(second) and np.allclose(first, second, rtol=slack, atol=0.0)
    if not near and before.trajectory != after.trajectory:
        return "keeps other numbers of tokens here"
    agreement = float((items_of(before).predicted == items_of(after).predicted).mean())
    if (before.cell.n_train == 0 or before.cell.track == "frozen") and agreement < AGREEING:
        return f"has not been trained, and {agreement:.2%} of its predictions are the same here"
    return ""


def _gains(group: Sequence[Pair], old: np.ndarray, new: np.ndarray) -> Iterator[str]:
    """Yield in what the reported cells of a task are better than those here by more than rounding makes them.

    Cells of a strategy beside the published one may not be worse either.

    Args:
        group: the cells.
        old, new: (n,) booleans, which of all their test items are right there and here.
    """
    surely = float(mcnemar((old & ~new).sum(), (new & ~old).sum())) / 2 < FALSE_ALARM
    signs = {1, 1 if group[0][0].kind == "deployable" else -1}
    for sign in signs:
        gain = sign * float(old.mean() - new.mean())
        if gain > max(MOST_BETTER, len(old) ** -0.5) or (surely and gain > SLACK):
            more = "more" if sign > 0 else "fewer"
            yield f"in {len(group)} cells {100 * gain:.1f} points {more} of the test items are right there than here"
    for name, better in MEANS.items():
        values = [[x.metrics[name].value if name in x.metrics else None for x in pair] for pair in group]
        pairs = np.array([pair for pair in values if None not in pair], dtype=float).reshape(-1, 2)
        reported, again = pairs.mean(axis=0) if len(pairs) else (0.0, 0.0)
        scale = max(abs(again), 1 / len(old)) if name in ("test_loss", "p_label") else 1.0
        if any(sign * better * (reported - again) > BETTER * scale for sign in signs):
            yield f"in {len(group)} cells the mean {name} is {reported:.4g} there and {again:.4g} here"


def _starts(command: Sequence[str]) -> bool:
    """Say whether a command starts Python: many containers refuse."""
    python = [*command, sys.executable, "-c", ""]
    return not subprocess.run(python, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode


@cache
def no_network() -> tuple[str, ...]:
    """Return the command that runs another without network, which is tried; nothing where the system has none."""
    command = "unshare", "--map-root-user", "--net"
    return command if shutil.which("unshare") and _starts(command) else ()


@cache
def has_sandbox() -> bool:
    """Say whether the system's `bwrap` can hide files, which is tried."""
    with tempfile.TemporaryDirectory() as room:
        return shutil.which("bwrap") is not None and _starts(_sandbox((), Path(room)))


def _sandbox(readable: Iterable[Path], room: Path) -> list[str]:
    """Return the command that runs another without network, in which only `room` can be written.

    Homes and temporary files are hidden, but for what is to be readable and what Python runs from.
    """
    folders = [Path.home().resolve(), *(Path(name).resolve() for name in ("/tmp", "/var/tmp", "/run", room.parent))]
    python = map(Path, (sys.prefix, sys.base_prefix, *filter(None, sys.path)))
    caches = (Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"), "hub"), Path.home() / ".cache/torch")
    paths = {os.path.abspath(path) for path in (*python, *caches, *readable)}
    tmpfs = [part for path in dict.fromkeys(folders) if path.is_dir() for part in ("--tmpfs", str(path))]
    # What holds a hidden folder would show all of that again.
    paths = {path for path in paths if not any(folder.is_relative_to(path) for folder in folders)}
    binds = [part for path in sorted(paths) for part in ("--ro-bind-try", path, path)]
    return [
        "bwrap", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent",
        "--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", *tmpfs, *binds,
        "--bind", str(room), str(room), "--dir", os.getcwd(), "--chdir", os.getcwd(),
    ]  # fmt: skip


@contextmanager
def enclose(readable: Iterable[Path] = ()) -> Iterator[None]:
    """Start workers without network and with few variables for a while, and, where the system can, with few files.

    Args:
        readable: what they need besides Python and its libraries; they write temporary files alone.
    """
    before, place = dict(os.environ), tempfile.tempdir
    for name in before:
        if not KEPT.fullmatch(name):
            del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="sparsebench-") as folder:
        room = Path(folder).resolve()
        PREFIX[:] = _sandbox(readable, room) if has_sandbox() else no_network()
        os.environ["TMPDIR"] = tempfile.tempdir = str(room)
        try:
            yield
        finally:
            PREFIX.clear()
            tempfile.tempdir = place
            os.environ.pop("TMPDIR")
            os.environ.update(before)
