"""The Python interface: run, load records, build a leaderboard."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from sparsebench.engine.options import Engine
    from sparsebench.planning.planner import Plan, Rerun
    from sparsebench.plugin.registry import Registry
    from sparsebench.records.cell import Where
    from sparsebench.records.record import Record

OUT = "sparsebench-out"


def run(
    plugins: Sequence[str] | str = (),
    *,
    suite: str = "quick",
    tasks: Sequence[str] | str = (),
    model: str | None = None,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    networks: str | os.PathLike[str] | None = None,
    images: str | None = None,
    backgrounds: str | None = None,
    pretrain_images: str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    download: bool = False,
    device: str = "auto",
    seeds: int | None = None,
    keep: Sequence[float] = (),
    macs: Sequence[float] = (),
    n_train: Sequence[int] = (),
    where: Where = "both",
    out: str | os.PathLike[str] = OUT,
    rerun: Rerun = "missing",
    jobs: int | None = None,
    checkpoint: float | None = 60.0,
    timeout: float | str | None = None,
    memory_limit: float | str | None = None,
    observe: Sequence[str] | str = (),
    shard: str | None = None,
    engine: Engine = "local",
    exclusive: bool = False,
    address: str | None = None,
    cluster: str | os.PathLike[str] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> pd.DataFrame:
    """Run what is missing and return the leaderboard of the request, one row a strategy and budget.

    The arguments are the options of `sparsebench run`; `checkpoint=None` is never, and `on_record` is called with each
    record as it comes.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable.
        KeyboardInterrupt: Ctrl-C; the first waits for the cells under way, the second ends them. What is done is kept.
    """
    import pandas as pd

    from sparsebench.board.build import columns_of, judge
    from sparsebench.board.columns import keys_of

    finished = execute(
        plugins=plugins, suite=suite, tasks=tasks, model=model, pretrained=pretrained, weights=weights,
        networks=networks, images=images, backgrounds=backgrounds, pretrain_images=pretrain_images,
        data_root=data_root, download=download,
        device=device, seeds=seeds, keep=keep, macs=macs, n_train=n_train, where=where, out=out, rerun=rerun, jobs=jobs,
        checkpoint=checkpoint, timeout=timeout, memory_limit=memory_limit, observe=observe, shard=shard, engine=engine,
        exclusive=exclusive, address=address, cluster=cluster, on_record=on_record,
    )  # fmt: skip
    judged = judge(finished)
    return pd.DataFrame(judged.rows, columns=keys_of(columns_of(judged.rows, judged.columns)))


def execute(
    *,
    plugins: Sequence[str] | str,
    suite: str,
    tasks: Sequence[str] | str,
    model: str | None,
    pretrained: bool,
    weights: str | os.PathLike[str] | None,
    networks: str | os.PathLike[str] | None,
    images: str | None,
    backgrounds: str | None,
    pretrain_images: str | None,
    data_root: str | os.PathLike[str] | None,
    download: bool,
    device: str,
    seeds: int | None,
    keep: Sequence[float],
    macs: Sequence[float],
    n_train: Sequence[int],
    where: Where,
    out: str | os.PathLike[str],
    rerun: Rerun,
    jobs: int | None,
    checkpoint: float | None,
    timeout: float | str | None,
    memory_limit: float | str | None,
    shard: str | None,
    engine: Engine,
    exclusive: bool,
    address: str | None,
    cluster: str | os.PathLike[str] | None,
    observe: Sequence[str] | str = (),
    on_record: Callable[[Record], None] | None = None,
    on_plan: Callable[[Plan, int], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> pd.DataFrame:
    """Run what is missing, write the leaderboard, and return the request's records, flat; see `run`.

    `on_plan` is called with the plan and the number of workers before the first cell starts, `on_stop` at the first
    Ctrl-C.
    """
    from sparsebench.board.publish import publish
    from sparsebench.engine import Limits, devices
    from sparsebench.engine import run as runs
    from sparsebench.engine.options import Choice
    from sparsebench.observe.observers import Observers
    from sparsebench.planning import planner
    from sparsebench.plugin.registry import Registry
    from sparsebench.records import store

    folder, registry = Path(out), Registry()
    choice = Choice.given(engine, address, cluster, jobs)
    device = choice.resolve_device(device)
    plan = plan_of(
        registry, plugins=plugins, suite=suite, tasks=tasks, model=model, pretrained=pretrained, weights=weights,
        networks=networks, images=images, backgrounds=backgrounds, pretrain_images=pretrain_images,
        data_root=data_root, download=download,
        seeds=seeds, keep=keep, macs=macs, n_train=n_train, where=where, out=folder, rerun=rerun, shard=shard,
    )  # fmt: skip
    limits = Limits.given(timeout, memory_limit, choice.in_processes, exclusive)
    store.check_writable(folder)
    planner.keep_suite(folder, plan.suite, plan.whole)
    observers = Observers(registry)
    observers.attach(_several(observe), folder)
    with choice.connected(device) if plan.todo else nullcontext() as there:
        workers = (
            devices.workers_for(plan, device, choice.jobs, exclusive)
            if there is None
            else there.slots(exclusive) or jobs or 1
        )  # none may have come yet
        if on_plan is not None:
            on_plan(plan, workers)
        runs.execute(
            plan, registry, folder, device, workers, on_record, checkpoint or 0.0, limits, on_stop, there, observers
        )
    known = _finished(folder, plan)
    publish(known, folder)
    return known[known["cell_id"].isin([job.cell.id for job in plan.jobs])]


def plan_of(
    registry: Registry,
    *,
    plugins: Sequence[str] | str,
    suite: str,
    tasks: Sequence[str] | str,
    model: str | None,
    pretrained: bool,
    weights: str | os.PathLike[str] | None,
    networks: str | os.PathLike[str] | None,
    images: str | None,
    backgrounds: str | None,
    pretrain_images: str | None,
    data_root: str | os.PathLike[str] | None,
    download: bool,
    seeds: int | None,
    keep: Sequence[float],
    macs: Sequence[float],
    n_train: Sequence[int],
    where: Where,
    out: str | os.PathLike[str],
    rerun: Rerun,
    shard: str | None,
) -> Plan:
    """Return what `run` would do; nothing is run and nothing written."""
    from sparsebench.planning import planner
    from sparsebench.planning.contenders import Request
    from sparsebench.planning.shard import Shard

    request = Request(
        plugins=_several(plugins), suite=suite, tasks=_several(tasks), model=model, pretrained=pretrained, seeds=seeds,
        keep=tuple(keep), macs=tuple(macs), n_train=tuple(n_train), where=where,
    )  # fmt: skip
    root, file, folder = (None if path is None else Path(path) for path in (data_root, weights, networks))
    files = planner.Files(images, backgrounds, pretrain_images, root, download, file, folder)
    return planner.plan(request, files, registry, Path(out), rerun, None if shard is None else Shard.parse(shard))


def refresh(folder: Path) -> bool:
    """Write the leaderboard of a run's folder again, from all its records, where it has one; return whether it has."""
    from sparsebench.board import reading
    from sparsebench.board.gather import WANTED
    from sparsebench.board.publish import publish

    if there := (folder / "leaderboard.csv").exists():
        publish(reading.read(folder, WANTED), folder)
    return there


def _finished(folder: Path, plan: Plan) -> pd.DataFrame:
    """Return the flat records of a plan's cells: of all that were to be run, and of others that are there."""
    from sparsebench.board import reading
    from sparsebench.board.gather import WANTED
    from sparsebench.errors import UserError

    known = reading.read(folder, WANTED)
    known = known[known["cell_id"].isin([job.cell.id for job in plan.whole])]
    if lost := {job.cell.id for job in plan.jobs} - set(known["cell_id"]):
        raise UserError(
            f"records of {len(lost)} cells in {folder} cannot be read, {min(lost)} among them",
            next_step="remove the lines that the warnings name, and give the same command again",
        )
    return known


def load_records(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return the records of a run's folder as a DataFrame, one row a cell, one column a metric.

    Raises:
        UserError: the folder holds no records.
    """
    from sparsebench.board import reading

    return reading.read(Path(path))


def leaderboard(records: pd.DataFrame, by: str | None = None) -> pd.DataFrame:
    """Return the leaderboard of records from `load_records`; `by="task"` gives a row a task and model as well.

    What files call "not reached" is infinity.

    Raises:
        UserError: `by` is another word.
    """
    import pandas as pd

    from sparsebench.board.build import columns_of, judge
    from sparsebench.board.columns import BY_TASK, keys_of

    judged = judge(records, by)
    first = BY_TASK if by and not judged.rows else ()
    return pd.DataFrame(judged.rows, columns=keys_of([*first, *columns_of(judged.rows, judged.columns)]))


def _several(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
