"""The Python interface: run, load records, build a leaderboard."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sparsebench.errors import UserError, few, plain
from sparsebench.plan.request import OPTIONS, Execution, Files, Request, values_of
from sparsebench.plugin import classes
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import ANSWERS, Record
from sparsebench.runner.progress import SILENT, Callbacks, Progress, in_a_notebook, remedy
from sparsebench.strategy.base import Strategy

if TYPE_CHECKING:
    import pandas as pd

    from sparsebench.board.board import Board
    from sparsebench.inspection.pictures import Pictures
    from sparsebench.records.store import Store

log = logging.getLogger(__name__)
OUT = "sparsebench-out"
Plugins: TypeAlias = "Sequence[str | os.PathLike[str] | Strategy | type[Strategy]] | str | Strategy | type[Strategy]"


def run(
    plugins: Plugins = (),
    *,
    out: str | os.PathLike[str] = OUT,
    on_record: Callable[[Record], None] | None = None,
    progress: bool | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Run the missing cells and return the leaderboard, one row for each strategy and budget; see `leaderboard`.

    A strategy is a name, a file, or your own class or instance. The source of a class, and your modules that it
    imports, are stored in `out`, and workers load them from there. The other arguments are the options of
    `sparsebench run`. `checkpoint=None` writes no checkpoints. `on_record` is called with each new record. `progress`
    shows a progress bar, by default in notebooks only.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable.
        KeyboardInterrupt: Ctrl-C. The first waits for the running cells, the second stops them. Finished cells are
            kept.
    """
    from sparsebench.board.columns import frame
    from sparsebench.board.notes import below_chance

    folder = _folder_of(out)
    with _callbacks(folder, progress, on_record) as callbacks:
        board, records = execute(*values_of({"plugins": _words_of(plugins, folder), **options}), folder, callbacks)
    lost = records[~records["status"].isin(ANSWERS)]
    if len(lost):
        first = plain(lost["reason"].iloc[0])
        log.warning("%s; the first: %s", remedy(lost["status"], "the same call", 'rerun="failed"'), first)
    for line in below_chance(records):
        log.warning("%s", line)
    return frame(board.judged.rows, board.judged.columns)


def _callbacks(
    out: Path, progress: bool | None, on_record: Callable[[Record], None] | None = None
) -> AbstractContextManager[Callbacks]:
    """Return the callbacks of a run. They show a progress bar if `progress`, by default in notebooks only."""
    on_record = on_record or SILENT.on_record
    visible = in_a_notebook() if progress is None else progress
    return Progress(out, on_record) if visible else nullcontext(Callbacks(on_record=on_record))


def _folder_of(out: Any) -> Path:
    """Return the run's folder; raise UserError if `out` is not a path."""
    if not isinstance(out, str | os.PathLike):
        raise UserError("out", got=repr(out), allowed="the path of a folder")
    return Path(out)


def _words_of(plugins: Plugins, out: Path) -> tuple[str, ...]:
    """Return strategies as text. The source code of classes and instances is written to the run's folder."""
    several = plugins if isinstance(plugins, list | tuple | set) else [plugins]
    names = []
    for plugin in several:
        if isinstance(plugin, Strategy) or (isinstance(plugin, type) and issubclass(plugin, Strategy)):
            names.append(classes.write(plugin, out))
        elif isinstance(plugin, str | os.PathLike):
            names.append(os.fspath(plugin))
        else:
            raise UserError(
                "plugins", got=plugin, allowed="names, files, and classes or instances of sparsebench.Strategy"
            )
    return tuple(names)


def show_tokens(
    plugins: Plugins,
    task: str = "composite",
    samples: int = 4,
    *,
    out: str | os.PathLike[str] = OUT,
    progress: bool | None = None,
    **options: Any,
) -> Pictures:
    """Return which patches of test pictures the strategies keep; a notebook shows the result as a picture.

    Networks are first trained with each strategy, unless `out` has them. Other arguments are options of
    `sparsebench show-tokens`.

    Args:
        plugins: the strategies.
        task: an image task.
        samples: the largest number of test pictures.
        out: the folder of the trained networks.
        progress: whether a progress bar is shown; by default in notebooks only.
        options: see `run`, but with one task and one seed.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable, or no strategy has a result.
    """
    from sparsebench.inspection.pictures import Trainer, show

    if not isinstance(samples, int) or samples < 1:
        raise UserError("samples", got=repr(samples), allowed="1 or more")
    folder = _folder_of(out)
    request, files, execution = values_of({"plugins": _words_of(plugins, folder), **options, "tasks": task, "seeds": 1})
    with _callbacks(folder, progress) as callbacks:
        return show(request, Trainer(files, execution, folder, callbacks), samples)


def _signature() -> inspect.Signature:
    """Return the signature of `run` with all options as keyword arguments."""
    bare = inspect.signature(run)
    first = [param for param in bare.parameters.values() if param.name != "options"]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for fields in OPTIONS.values()
        for name, field in fields.items()
        if name != "plugins"
    ]
    return bare.replace(parameters=[*first, *options])


run.__signature__ = _signature()  # type: ignore[attr-defined]


def execute(
    request: Request, files: Files, execution: Execution, folder: Path | Store, callbacks: Callbacks
) -> tuple[Board, pd.DataFrame]:
    """Run the missing cells and write the leaderboard; see `run`.

    Returns:
        The board of all stored cells of the request, and the stored records of this run's cells (its shard, or all).
    """
    from sparsebench.records.store import Store
    from sparsebench.runner import run as runs

    opened = Store.open(folder)
    out = opened.path
    runs.begin(execution, out)  # worker processes load while the board is imported here
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        import_module(name)
    from sparsebench.board.board import board_of
    from sparsebench.board.published import publish
    from sparsebench.board.reading import frame_of, read
    from sparsebench.publish.submission import badges

    plan = runs.run_missing(request, files, execution, Registry(), opened, callbacks)
    stored = frame_of(read(opened, badges=badges(opened.path)))
    rows = stored[stored["cell_id"].isin([job.cell.id for job in plan.whole])]
    others = set(stored["network"]) - set(rows["network"])
    if others and (rows["network"] != "").any():
        names = few(sorted(others), width=60)
        log.warning("%s also has results of other weights, %s: `sparsebench leaderboard` averages them too", out, names)
    absent = sorted(set(stored["strategy"].astype(str)) - set(rows["strategy"].astype(str)))
    if absent:
        names = few(absent, 5, 60)
        log.warning("%s also has results of %s: `sparsebench leaderboard %s` shows them", out, names, out)
    records = rows[rows["cell_id"].isin([job.cell.id for job in plan.jobs])]
    board = board_of(rows, opened)
    publish(board, out)
    return board, records


def refresh(folder: Path) -> bool:
    """Write the leaderboard of a run's folder again, from all its records, if it has one; return whether it has one."""
    from sparsebench.board.board import gather
    from sparsebench.board.published import publish
    from sparsebench.publish.submission import badges

    if exists := (folder / "leaderboard.csv").exists():
        publish(gather(folder, badges(folder)), folder)
    return exists


def load_records(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return the records of a run's folder as a DataFrame, with one row per cell and one column per metric.

    If no cell has a result, the metrics of sparsebench are empty columns.

    Raises:
        UserError: the folder has no records.
    """
    from sparsebench.board.reading import read
    from sparsebench.publish.submission import badges

    folder = Path(path)
    return read(folder, None, badges(folder))


def leaderboard(records: pd.DataFrame | str | os.PathLike[str], by: str | None = None) -> pd.DataFrame:
    """Return the leaderboard of records from `load_records`, or of a run's folder.

    Flags are booleans. Values that files call "not reached" are infinity. Parameters of strategies are columns
    `strategy.NAME`. `attrs` describes each column, with its unit.

    Args:
        records: the records, or the path of the folder.
        by: None for one row for each strategy and budget, "task" for separate rows for each task and model.

    Raises:
        UserError: `by` is not one of these, or `records` does not hold records.
    """
    import pandas as pd

    from sparsebench.board.columns import frame
    from sparsebench.board.judge import judge

    if isinstance(records, str | os.PathLike):
        records = load_records(records)
    if not isinstance(records, pd.DataFrame) or "cell_id" not in records:
        raise UserError("records", got=type(records).__name__, allowed="what load_records returns, or a run's folder")
    result = judge(records, by)
    return frame(result.rows, result.columns)
