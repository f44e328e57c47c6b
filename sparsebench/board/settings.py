"""The records of a folder as a table, and its settings. Strategies and budgets are compared within a setting."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board.columns import EVERY
from sparsebench.errors import UserError, few, plain
from sparsebench.measure.metrics import GROUP as OF_GROUPS
from sparsebench.measure.metrics import METRICS as KINDS
from sparsebench.measure.metrics import MetricKind
from sparsebench.records import manifests, reports, store, table
from sparsebench.records.record import SHIPPED, canonical, numbers_of
from sparsebench.records.reports import CHECKS, REMARK, UNCHECKED
from sparsebench.records.table import FOREGROUNDS, GROUPS, IDENTITY, ITEMS, LABELS, OUTCOMES, PREDICTIONS, WHERE
from sparsebench.stats.paired import Contender
from sparsebench.strategy.base import reduction_of
from sparsebench.strategy.spec import label
from sparsebench.tasks.sources.labels import numbering

NO_BADGES: Mapping[str, str] = MappingProxyType({})
"""The badges of a folder that is not a submission."""
Flats = Iterable[Mapping[str, Any]]
"""Flat records: mappings, or a DataFrame."""
Tests = dict[tuple[Any, Any], list[Any]]
"""The records of the tests of one seed, by labels and foregrounds of the test. Several draws have several records."""
DENSE = "dense"
PRETRAINING = "plain"
SHOWN = tuple(kind for kind in KINDS if kind.over_seeds != "none" and not kind.name.endswith(OF_GROUPS))
"""The metrics of sparsebench that have a column. Some of these columns are not plain means over seeds."""
METRICS = (
    *(kind.name for kind in SHOWN),
    "success",
    "success_loss",
    "fitted",
    "macs",
    "macs_ratio_planned",
    "accuracy_top5",
    "parameters",
    "timed_batch",
)
"""The metrics that the board reads, besides accuracies of groups and metrics that tasks declare."""
ORDER = ["n_train", "repetition", "cell_id"]
"""Order of records. Floating-point sums depend on the order, and the board must not."""
READY = "ready for the board"
"""Attribute of a table that `frame_of` has returned."""
SEED = "seed"
"""The column of the unit of paired comparisons: the number of the tested network, otherwise the repetition."""
DRAW = "draw"
"""The column that numbers the tests of one network; 0 if each repetition trains its own network."""
CELL = ["n_train", SEED, DRAW]
"""Columns that identify a cell of a row in its setting."""
KEY = ["strategy", "kind", "budget"]
"""Columns that identify a row of a board. The column `entry` numbers their combinations, in order."""
DECLARED, MAIN, SUCCESS = "metrics of tasks", "main tasks", "metric of success"
"""Attributes of a table of records: the metrics that its tasks declare, the main tasks of its suites, and the suites'
metric of success for sample complexity; the default is `success`. Attributes are plain data, because pandas stores them
as JSON in some files. A metric is the mapping of its fields."""
ON_BACKGROUND = re.compile(r"accuracy: .+ on .+(?<!\.low)(?<!\.high)")
"""Names of the accuracies of groups, if each group is a class on a background."""
TRACK = "scratch"
"""The track of records without a track."""
_IDENTITY_WITHOUT_CELL = dict.fromkeys(IDENTITY, "") | {"strategy_params": "{}", "budget_where": "both"}
LACKING = dict.fromkeys(
    (
        "cell_id",
        "status",
        "reason",
        "task",
        "model",
        "strategy",
        "kind",
        "budget",
        "setting",
        "device",
        "environment",
        "inactive",
        "cost_model",
        "trained",
        "badge",
        "how",
        "network",
        *OUTCOMES[1:],
        GROUPS,
        FOREGROUNDS,
    ),
    "",
) | {
    "track": TRACK,
    CHECKS: UNCHECKED,
    "distribution": SHIPPED,
    "n_train": 0,
    "repetition": 0,
    ITEMS: 0,
}
"""The columns that the board reads besides metrics, with their values for a table without them."""
NAMED = 5
"""Largest number of networks that `about` names."""
TRACKS = {
    "frozen": "trained without a strategy; strategies act in the test only",
    "tuned": "trained further with the strategy",
    "scratch": "trained with the strategy",
}
"""Descriptions of the networks of each track."""
SOURCES = {"photos": "photographs", "pictures": "photographs of a folder", "folder": "pictures of a folder"}
"""Names of sources of pictures that tables show differently. The source of a user's folder ends with a hash."""


def read(out: Path, metrics: Container[str] | None = METRICS, badges: Mapping[str, str] = NO_BADGES) -> pd.DataFrame:
    """Return the records of a run's folder as a table, with the columns that `describe` adds.

    The table has the plain columns of `table`, the columns IDENTITY, outcomes, metrics that tasks declare, and
    `metrics`. Its attributes DECLARED, MAIN and SUCCESS describe the declared metrics and the suites' boards.
    Predictions are decoded later, when they are used. Users' folders of pictures and files of weights have their names
    in place of hashes.

    Args:
        out: the run's folder.
        metrics: names of the metrics to read; None for all.
        badges: see `describe`.

    Raises:
        UserError: as `store.rows`.
    """
    import pyarrow as pa

    kinds = manifests.metrics(out)
    declared = {kind.name for kind in kinds}
    unread = {*table.PARTS, table.RANKS, "memory", table.CHECKSUM} - {"cell"}

    def wanted(name: str) -> bool:
        if not table.is_metric(name):
            return name not in unread
        if metrics is None or name in metrics or name in declared:
            return True
        return ON_BACKGROUND.fullmatch(name) is not None

    rows = store.rows(out, wanted).drop_columns([table.CHECKSUM])
    rows = rows.sort_by([(name, "ascending") for name in ORDER])
    in_arrow = {pa.string(), pa.binary()}  # more compact than objects
    records = rows.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if kind in in_arrow else None)
    if not (records["status"] == "ok").any():
        # Without a result, records have no metrics: their columns are empty.
        empty = {}
        for kind in (*KINDS, *kinds):
            name = kind.name
            if name not in records and not name.endswith(OF_GROUPS) and wanted(name):
                empty[name] = math.nan
        records = records.assign(**empty)
    records = _with_identities(records)
    records = describe(_with_names(records, manifests.file_names(out)), out, badges)
    records.attrs[DECLARED] = [asdict(kind) for kind in kinds]

    # The suite with the most settings comes first.
    suites = sorted(manifests.suites(out), key=lambda suite: len(suite.settings), reverse=True)
    mains = [suite.main_task for suite in suites if suite.main_task]
    records.attrs[MAIN] = list(dict.fromkeys(mains))
    success = [suite.sample_complexity for suite in suites if suite.sample_complexity]
    if success:
        records.attrs[SUCCESS] = success[0]
    return records


def _with_identities(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with the columns IDENTITY in place of their cells."""
    labels = ["cell", "strategy", "budget", "track"]
    grouped = records.groupby(labels, observed=True, sort=False, dropna=False)
    rows = []
    for cell, strategy, budget, track in grouped.groups:
        try:
            rows.append(table.identity_of(cell, strategy, track))
        except (ValueError, UserError):  # the file was not written by sparsebench
            rows.append(_IDENTITY_WITHOUT_CELL | {"strategy_name": strategy, "budget_value": budget})
    return _with_columns(records.drop(columns="cell"), grouped, pd.DataFrame(rows, columns=list(IDENTITY)))


def _with_columns(records: pd.DataFrame, grouped: Any, columns: pd.DataFrame) -> pd.DataFrame:
    """Return records with columns that have one row for each group of the records."""
    number = grouped.ngroup()
    return records.assign(**{name: pd.Categorical(values).take(number) for name, values in columns.items()})


def _with_names(records: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return records with the names of users' folders of pictures and files of weights in place of hashes.

    The hash follows a name that settings also use for something else, such as shipped pictures.
    """
    settings, networks = (records[name].astype("category") for name in ("setting", "network"))
    text = "\n".join(settings.cat.categories)
    names = {name: f"{file} ({name})" if canonical(file) in text else file for name, file in names.items()}
    in_json = {canonical(name): canonical(file) for name, file in names.items()}
    pattern = re.compile("|".join(map(re.escape, in_json)) or "(?!)")
    return records.assign(
        setting=settings.cat.rename_categories(lambda setting: pattern.sub(lambda match: in_json[match[0]], setting)),
        network=networks.cat.rename_categories(
            lambda text: " ".join(names.get(name, name) for name in text.split(" "))
        ),
    )


def describe(records: pd.DataFrame, out: Path, badges: Mapping[str, str] = NO_BADGES) -> pd.DataFrame:
    """Return records with columns on their strategies: checks, remark, trained, badge, how.

    Args:
        records: the records of a run's folder.
        out: the folder, which describes the strategies and has the reports of their checks.
        badges: badges of submitted strategies, by name; the folder itself cannot say them.
    """
    check_reports, strategies = reports.read(out), manifests.strategies(out)
    columns = ["strategy", "strategy_name", "strategy_params", "revision"]
    grouped = records.groupby(columns, observed=True, sort=False)
    rows = []
    for strategy, name, params, revision in grouped.groups:
        checks, remark = reports.badge_of(check_reports, strategy, revision)
        row = {CHECKS: checks, REMARK: remark, "trained": "", "badge": badges.get(name, ""), "how": ""}
        entry = strategies.get((name, revision))
        if entry is not None:
            row["trained"] = "yes" if entry.trained else "no"
            row["how"] = plain(reduction_of(entry.how, json.loads(params)))
        rows.append(row)
    return _with_columns(records, grouped, pd.DataFrame(rows))


def frame_of(records: Flats) -> pd.DataFrame:
    """Return flat records as a table with all columns that the board reads, sorted by ORDER."""
    frame = records if isinstance(records, pd.DataFrame) else pd.DataFrame(list(records))
    if frame.attrs.get(READY):
        return frame
    if "cell" in frame:
        frame = _with_identities(frame)
    names = [*METRICS, "macs_ratio_asked", *(kind.name for kind in metrics_of(frame))]
    numbers = frame.reindex(columns=list(dict.fromkeys(names)))
    if (success := frame.attrs.get(SUCCESS)) in frame:
        numbers["success"] = frame[success]
    numbers = numbers.astype(float)
    numbers[["success", "success_loss"]] = numbers[["success", "success_loss"]].clip(0, 1)
    lacking = {name: value for name, value in LACKING.items() if name not in frame}
    frame = _with_labels_as_identities(frame.assign(**lacking, **numbers))
    frame = frame.sort_values(ORDER, kind="stable", ignore_index=True)
    tested = frame["network"].astype(str)
    number = {name: i for i, name in enumerate(sorted(set(tested) - {""}))}
    frame[SEED] = frame["repetition"].where(tested == "", tested.map(number)).astype(int)
    frame[DRAW] = frame["repetition"].where(tested != "", 0).astype(int)
    frame["entry"] = frame[KEY].astype(str).groupby(KEY).ngroup()
    frame.attrs[READY] = True
    return frame


def _with_labels_as_identities(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose rows all have the columns IDENTITY. Labels take their place in rows without cells."""
    defaults = _IDENTITY_WITHOUT_CELL | {"strategy_name": frame["strategy"], "budget_value": frame["budget"]}
    columns = {}
    for name, default in defaults.items():
        if name not in frame:
            columns[name] = default
        elif frame[name].isna().any():
            columns[name] = frame[name].astype(object).where(frame[name].notna(), default)
    return frame.assign(**columns)


def metrics_of(frame: pd.DataFrame) -> list[MetricKind]:
    """Return the metrics whose columns are means or medians over seeds: some of SHOWN, and those that tasks declare."""
    columns = {column.key for column in EVERY}
    declared = [MetricKind(**fields) for fields in frame.attrs.get(DECLARED, ())]
    shown = (kind for kind in SHOWN if kind.name not in columns)
    return [*shown, *(kind for kind in declared if kind.over_seeds != "none")]


def dense_of(records: pd.DataFrame) -> pd.DataFrame:
    """Return the records of dense."""
    dense = records[records["strategy"] == DENSE]
    return dense[dense["entry"] == dense["entry"].min()]


def over_seeds(records: pd.DataFrame, aggregation: Mapping[str, str]) -> pd.DataFrame:
    """Return metrics over seeds, one row for each entry; NaN if nothing was measured.

    Args:
        records: the records; several draws on a network are averaged first.
        aggregation: "mean" or "median", by metric.
    """
    by_seed = records.groupby(["entry", SEED])[list(aggregation)].mean()
    entries, first = np.unique(by_seed.index.get_level_values("entry"), return_index=True)
    columns = {}
    for name, kind in aggregation.items():
        seeds = (part[~np.isnan(part)] for part in np.split(by_seed[name].to_numpy(), first[1:]))
        # NumPy, as means of pandas can differ in the last digit, which would change the order of equal strategies.
        columns[name] = [getattr(np, kind)(values) if values.size else math.nan for values in seeds]
    return pd.DataFrame(columns, entries, dtype=float)


def speed_ups(records: pd.DataFrame) -> pd.Series:
    """Return for each timed entry the median over seeds of images/s divided by dense's on the same seed and machine."""
    where = [SEED, "device", "environment"]
    timed = records.loc[records["images_per_s"].notna(), ["entry", "strategy", "images_per_s", *where]]
    timed = timed.astype(dict.fromkeys(where[1:], str))
    base = dense_of(timed).drop_duplicates(where, keep="last").set_index(where)["images_per_s"]
    ratio = timed["images_per_s"] / timed[where].join(base[base > 0], on=where)["images_per_s"]
    return ratio.groupby(timed["entry"]).median().dropna()


class Common(NamedTuple):
    """What the strategies of a setting are compared on, who lacks some of it, and who has more.

    A cell is common if dense and at least half of the strategies have it. A strategy has a cell if it has it at all of
    its common budgets. A draw on a network counts among the strategies that draw random numbers.

    Attributes:
        dense: whether dense is missing. Then nothing is ranked.
        cells: the common cells, each a number of training samples, a seed, and a draw.
        lacking: whether a record is missing, with a row for each entry and a column for each common cell. Failed and
            unsupported cells are not missing.
        more: the number of other cells that a strategy has, by strategy, if any.
        fewer: the strategies that lack some of these other cells.
        budgets: shares of dense MACs at which at least half of the curves were run, falling; empty if no strategy was
            run at several.
        shares: the budgets that an entry's curve lacks, by entry, if any.
        more_budgets: the other budgets of a strategy, by strategy, if any.
        fewer_budgets: the strategies that lack some of these other budgets.
        apart: entries without a result in some common cell, with the other points of their curves: a strategy is ranked
            at all of its common budgets or at none.
        used: whether the board uses a result, with a row for each entry and a column for each cell.
    """

    dense: bool
    cells: pd.MultiIndex
    lacking: pd.DataFrame
    more: Mapping[str, int]
    fewer: Sequence[str]
    budgets: tuple[float, ...]
    shares: Mapping[int, set[float]]
    more_budgets: Mapping[str, set[float]]
    fewer_budgets: Sequence[str]
    apart: set[int]
    used: pd.DataFrame


@dataclass(eq=False)
class Setting:
    """The records with the same task and model, with equal parameters, track, and mostly number of training samples.

    Attributes:
        source: the name of the task.
        task, model: names of task and model, with the parameters that differ between settings of the same names. If
            tracks differ, the task's name includes the track.
        setting: the parameters of task and model, as `row_of` writes them.
        n_train: number of training samples; 0 if the task has a success criterion, as all sizes are then together.
        track: see `cell.Track`; strategies of different tracks are never ranked together.
        measured: the records with status ok.
        others: the other records.
        every: a row for each entry of all settings: strategy, kind and budget, with the columns IDENTITY; `asked`, the
            requested share of dense MACs; `form`, the label of the budget without this share; and `line`, the curve
            over budgets that has the entry as a point: strategy, kind and form. `line` is None for dense, and for a
            budget that is not a share of dense MACs.
    """

    source: str
    task: str
    model: str
    setting: str
    n_train: int
    track: str
    measured: pd.DataFrame
    others: pd.DataFrame
    every: pd.DataFrame

    @cached_property
    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of task and model; empty if `setting` cannot be parsed."""
        try:
            task, model = (part["params"] for part in json.loads(self.setting)[:2])
        except (ValueError, TypeError):
            return {}, {}
        return task, model

    @cached_property
    def entries(self) -> pd.DataFrame:
        """The rows of `every` that have records in this setting."""
        return self.every.loc[np.unique(self.measured["entry"])]

    @cached_property
    def records(self) -> pd.DataFrame:
        """The records that the board uses: those of common cells, or all of an entry that has none of these cells."""
        used = self.common.used
        rows = used.index.get_indexer(self.measured["entry"])
        columns = used.columns.get_indexer(pd.MultiIndex.from_frame(self.measured[CELL]))
        mask = used.to_numpy()[rows, columns]
        return self.measured if mask.all() else self.measured[mask]

    @cached_property
    def largest(self) -> int:
        """The largest number of training samples."""
        sizes = self.common.cells.get_level_values("n_train")
        return int(max(sizes, default=self.measured["n_train"].max()))

    @cached_property
    def tested(self) -> pd.DataFrame:
        """The records at the largest number of training samples."""
        return self.records[self.records["n_train"] == self.largest]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds at the largest number of training samples on which strategies are compared."""
        cells = self.common.cells
        return sorted(set(cells[cells.get_level_values("n_train") == self.largest].get_level_values(SEED)))

    @property
    def title(self) -> str:
        """The title: task, model and track, and the number of training samples unless the track is frozen."""
        most = f"{'up to ' if self.has_trials else ''}{self.largest}"
        samples = f"{most} training samples" if self.largest and self.track != "frozen" else ""
        return ", ".join(filter(None, (self.task, self.model, samples, self.track)))

    @cached_property
    def networks(self) -> dict[int, str]:
        """The common networks that are tested as they are, by seed, see `Cell.network`; all if none is common.

        Empty if repetitions are trained.
        """
        names = self.measured.loc[self.measured["network"] != "", [SEED, "network"]].drop_duplicates(SEED)
        networks = names.set_index(SEED)["network"].to_dict()
        return {seed: networks[seed] for seed in self.seeds if seed in networks} or networks

    @cached_property
    def lone(self) -> bool:
        """Whether strategies are compared on one network or seed: intervals and tests are then over its test items."""
        return len(self.seeds) == 1

    @cached_property
    def has_trials(self) -> bool:
        """Whether the task has a success criterion."""
        return bool(self.measured["success"].notna().any())

    def has(self, metric: str) -> bool:
        """Return whether a metric was measured at the largest number of training samples."""
        return bool(self.tested[metric].notna().any())

    @cached_property
    def common(self) -> Common:
        """What the strategies are compared on."""
        entries = self.entries
        others = self.others[self.others["entry"].isin(entries.index)]

        # Points of curves are compared at the common budgets only, all other entries always.
        budgets, shares, more_budgets, fewer_budgets = self._budgets()
        is_compared = entries["asked"].isin(budgets) | entries["line"].isna() | (not budgets)
        strategies = entries.loc[is_compared, "strategy"]

        # Tables with a row for each entry and a column for each cell.
        cells = pd.concat([self.measured[["entry", *CELL]], others[["entry", *CELL]]])
        has_record = cells.groupby(["entry", *CELL]).size().unstack(CELL).notna()
        results = self.measured.groupby(["entry", *CELL]).size().unstack(CELL)
        has_result = results.reindex(columns=has_record.columns).notna()

        # A strategy without random draws is tested once on a network. So only the strategies that draw random numbers
        # can have its further tests, unless each repetition has other test pictures: then all are tested repeatedly.
        pictures_vary = self._pictures_vary()
        is_further = has_record.columns.get_level_values(DRAW) > 0
        draws = has_record.loc[:, is_further].any(axis=1) | pictures_vary
        strategy_draws = draws[is_compared].groupby(strategies).any()

        # For each cell the place of the network's first test, or its own place if no test stands for others.
        places = {cell: place for place, cell in enumerate(has_record.columns)}
        first = []
        for place, (n_train, seed, _) in enumerate(has_record.columns):
            first.append(place if pictures_vary else places.get((n_train, seed, 0), place))

        # A cell is common if at least half of the strategies that can have it do, and if dense has a result of the
        # network's first test. A further test is common only if the first one is.
        by_strategy = has_record[is_compared].groupby(strategies).all()
        n_able = np.where(is_further, strategy_draws.sum(), len(by_strategy))
        is_common = np.array(2 * by_strategy.sum() >= n_able)
        if DENSE in strategies.array:
            dense = strategies.index[strategies == DENSE][0]
            is_common &= has_result.loc[dense].to_numpy()[first]
        is_common &= is_common[first]

        # An entry is apart if it lacks an expected result. A whole curve is apart if one of its compared points is, or
        # if it lacks a common budget.
        is_expected = is_common & (~is_further | draws.to_numpy()[:, None])
        lacking = is_expected & ~has_record & is_compared.to_numpy()[:, None]
        without_result = (is_expected & ~has_result).any(axis=1) | (not is_common.any())
        points_without = [*without_result.index[without_result & is_compared], *shares]
        incomplete = set(entries.loc[points_without, "line"].dropna())
        apart = without_result | entries["line"].isin(incomplete)

        # Results of cells that are not common: the strategies that have some, and those that lack some of these.
        result_of_strategy = has_result[is_compared].groupby(strategies)
        more = result_of_strategy.any() & ~is_common
        n_more = more.sum(axis=1)
        is_able = ~is_further | strategy_draws.to_numpy()[:, None]
        fewer = (more.any() & ~result_of_strategy.all() & is_able).any(axis=1)

        no_dense = self.source != PRETRAINING and DENSE not in set(entries["strategy"])
        return Common(
            dense=no_dense,
            cells=has_record.columns[is_common],
            lacking=lacking.loc[:, is_common],
            more=n_more[n_more > 0].to_dict(),
            fewer=fewer.index[fewer].tolist(),
            budgets=budgets,
            shares=shares,
            more_budgets=more_budgets,
            fewer_budgets=fewer_budgets,
            apart=set(apart.index[apart]),
            used=self._used(has_result, is_common, is_compared),
        )

    def _budgets(self) -> tuple[tuple[float, ...], dict[int, set[float]], dict[str, set[float]], list[str]]:
        """Return the attributes of `Common` on budgets: `budgets`, `shares`, `more_budgets` and `fewer_budgets`."""
        entries = self.entries
        points = entries.dropna(subset="line")
        if not points.duplicated("line").any():
            return (), {}, {}, []
        # A budget at which a curve has only failed cells was run too.
        without_result = self.every.loc[np.unique(self.others["entry"])]
        points = pd.concat([points, without_result[without_result["line"].isin(points["line"])]])
        run = points.groupby("line")["asked"].agg(set).to_dict()

        n_curves = Counter(chain.from_iterable(run.values()))
        common = {budget for budget, n in n_curves.items() if 2 * n >= len(run)}
        others = set(n_curves) - common

        shares: dict[int, set[float]] = {}
        for entry, line in entries["line"].items():
            if line in run and not common <= run[line]:
                shares[entry] = common - run[line]
        more: dict[str, set[float]] = defaultdict(set)
        fewer: set[str] = set()
        for (strategy, _, _), budgets in run.items():
            more[strategy] |= budgets & others
            if not others <= budgets:
                fewer.add(strategy)
        more = {strategy: budgets for strategy, budgets in more.items() if budgets}
        return tuple(sorted(common, reverse=True)), shares, more, sorted(fewer)

    def _used(self, has_result: pd.DataFrame, is_common: np.ndarray, is_compared: pd.Series) -> pd.DataFrame:
        """Return which results the board uses: common cells that all points of a curve have.

        So all numbers of a strategy rest on the same cells. An entry without such a cell is shown with all its results.

        Args:
            has_result: whether a cell has a result, with a row for each entry and a column for each cell.
            is_common: whether a cell is common.
            is_compared: whether an entry is a point of a curve at a common budget, or of no curve.
        """
        used = has_result & is_common
        lines = self.entries["line"]
        points = used[is_compared & lines.notna()]
        by_all = points.groupby(lines[points.index]).transform("all")
        by_all = by_all[by_all.any(axis=1)]
        used.loc[by_all.index] = by_all
        without = ~used.any(axis=1)
        used[without] = has_result[without]
        return used

    def _pictures_vary(self) -> bool:
        """Return whether repetitions test one network on different pictures."""
        tests = self.measured.loc[self.measured["network"] != "", ["entry", SEED, LABELS, FOREGROUNDS, PREDICTIONS]]
        tests = tests[tests.pop(PREDICTIONS).map(bool).astype(bool)]
        return bool(tests.drop_duplicates().duplicated(["entry", SEED]).any())

    @cached_property
    def contenders(self) -> dict[int, tuple[Contender, dict[int, np.ndarray]]]:
        """The contender of each entry for paired comparisons, and for each seed the group of each test item, if known.

        A contender has for each seed its accuracy, and for each test item whether it is correct, or the share of draws
        in which it is. If repetitions test a network on different pictures, their items are concatenated. Strategies
        share the arrays of numbers that are equal for a seed.
        """
        means = self.tested.groupby(["entry", SEED])["accuracy"].mean().dropna()
        of_entry = {entry: part.droplevel("entry").to_dict() for entry, part in means.groupby("entry")}

        # The records of each test, by entry and seed. A test is identified by its labels and foregrounds.
        tests: dict[int, dict[int, Tests]] = {entry: {} for entry in set(self.tested["entry"])}
        names = ["entry", SEED, ITEMS, LABELS, FOREGROUNDS, GROUPS, PREDICTIONS]
        for row in self.tested[names].itertuples(index=False):
            if row.test_predictions:
                of_seed = tests[row.entry].setdefault(row.seed, defaultdict(list))
                of_seed[row.test_labels, row.test_foregrounds].append(row)

        numbers = cache(numbers_of)  # strategies share the arrays
        contenders = {}
        for entry, of_seeds in tests.items():
            contenders[entry] = _contender(of_entry.get(entry, {}), of_seeds, numbers)
        return contenders


def _contender(
    means: Mapping[int, float], tests: Mapping[int, Tests], numbers: Any
) -> tuple[Contender, dict[int, np.ndarray]]:
    """Return a contender, and for each seed the group of each test item, if known.

    Args:
        means: the accuracy of each seed.
        tests: the tests of each seed.
        numbers: `numbers_of`, with a cache.
    """
    hits: dict[int, tuple[Hashable, np.ndarray]] = {}
    groups: dict[int, np.ndarray] = {}
    foregrounds: dict[int, np.ndarray] = {}
    for seed, of_seed in tests.items():
        names = sorted(of_seed)
        hits[seed] = tuple(names), _join([_hits(of_seed[name], numbers) for name in names])
        first = [of_seed[name][0] for name in names]  # all draws of a test have its items
        if all(row.test_groups for row in first):
            groups[seed] = _join([numbers(row.test_groups, row.test_items) for row in first])
        if all(row.test_foregrounds for row in first):
            foregrounds[seed] = _join([numbers(row.test_foregrounds, row.test_items) for row in first])

    # If the draws of one seed differ, its hits are shares. Then those of all seeds are.
    if any(item_hits.dtype != bool for _, item_hits in hits.values()):
        hits = {seed: (name, item_hits.astype(float)) for seed, (name, item_hits) in hits.items()}

    # Items with the same foreground form a cluster, if it occurs more than once.
    clusters = None
    if tests and len(foregrounds) == len(tests):
        n_items = np.bincount(np.concatenate(list(foregrounds.values())))
        if n_items.max() > 1:
            clusters = foregrounds
    return Contender(means, hits, clusters), groups


def _hits(rows: Sequence[Any], numbers: Any) -> np.ndarray:
    """Return (I,) whether each item of a test is correct; if draws differ, the share of draws in which it is."""
    truth = numbers(rows[0].test_labels, rows[0].test_items)
    first, *others = (numbers_of(row.test_predictions, row.test_items) == truth for row in rows)
    equal = all((hits == first).all() for hits in others)
    return first if equal else np.mean([first, *others], axis=0)


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the parts concatenated; a single part is not copied, as others may share it."""
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def settings_of(frame: pd.DataFrame) -> list[Setting]:
    """Return the settings of the records with status ok, sorted by task, parameters, size and track.

    Settings of the same task and model have names that include their differences.

    Args:
        frame: records, from `frame_of`.
    """
    entries = _entries(frame)
    ok = (frame["status"] == "ok").to_numpy(bool)
    measured_records = frame[ok]
    other_records = frame[~ok]
    measured_records.attrs = other_records.attrs = {}  # pandas would copy them with each part
    others_of = {where: part for where, part in other_records.groupby(["task", "setting", "track"], observed=True)}

    # All numbers of training samples are together if the task has a success criterion.
    size = measured_records["n_train"].where(measured_records["success"].isna(), 0).rename("size")
    groups = measured_records.groupby(["task", "setting", size, "track"], observed=True, sort=False)
    of_names: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for (task, text, n_train, track), measured in groups:
        others = others_of.get((task, text, track), other_records[:0])
        if n_train:
            others = others[others["n_train"] == n_train]
        model = str(measured["model"].iloc[0])
        setting = Setting(task, task, model, text, int(n_train), track, measured, others, entries)
        of_names[task, model].append(setting)

    # Settings of the same task and model are told apart by the parameters in which they differ.
    settings = []
    for (task, model), alike in of_names.items():
        task_params = _varying([setting.params[0] for setting in alike])
        model_params = _varying([setting.params[1] for setting in alike])
        tracks = {setting.track for setting in alike}
        for setting, of_task, of_model in zip(alike, task_params, model_params, strict=True):
            if len(tracks) > 1:
                of_task["track"] = setting.track
            name_of_task = plain(label(task, of_task), 1000)
            name_of_model = plain(label(model, of_model), 1000)
            settings.append(replace(setting, task=name_of_task, model=name_of_model))
    return sorted(settings, key=lambda setting: (setting.source, setting.setting, setting.n_train, setting.track))


def _entries(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each entry of the records, see `Setting.every`."""
    names = [*KEY, *IDENTITY]
    first = frame[["entry", *names, "macs_ratio_asked"]].drop_duplicates("entry").set_index("entry").sort_index()
    entries = first[names].astype(object).assign(asked=first["macs_ratio_asked"])
    forms, lines = [], []
    for entry in entries.itertuples(index=False):
        form = entry.budget
        if not math.isnan(entry.asked):
            words = [word for word in (entry.budget_rounding, entry.budget_places) if word]
            form = (" ".join(words) + WHERE[entry.budget_where]).removeprefix(", ")
        is_point = entry.strategy != DENSE and entry.asked < 1
        forms.append(form)
        lines.append((entry.strategy, entry.kind, form) if is_point else None)
    as_objects = {"form": forms, "line": lines}
    return entries.assign(
        **{name: pd.Series(values, entries.index, dtype=object) for name, values in as_objects.items()}
    )


def _varying(params_of_all: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each set of parameters reduced to those that differ between the sets or are missing in some."""
    keys = {key for params in params_of_all for key in params}
    varied = {key for key in keys if len({canonical(params.get(key)) for params in params_of_all}) > 1}
    return [{key: value for key, value in params.items() if key in varied} for params in params_of_all]


def pictures_of(setting: Setting) -> str:
    """Return what the pictures of a task show; "" if the task does not name any."""
    names = (setting.params[0].get(key) for key in ("images", "backgrounds"))
    return " on ".join(SOURCES.get(x.partition("-")[0], x) for x in names if isinstance(x, str) and x)


def items_of(setting: Setting) -> str:
    """Return what a test consists of: images, or samples of a task without pictures, such as sets of tokens."""
    has_images = pictures_of(setting) or "canvas" in setting.params[0] or "patch" in setting.params[1]
    return "images" if has_images else "samples"


def about(setting: Setting) -> str:
    """Return one sentence on the data, and one on the networks and the track."""
    task, model = setting.params
    dense = dense_of(setting.tested)

    pictures = pictures_of(setting)
    data = [f"{pictures} (task {setting.task})" if pictures else f"task {setting.task}"]
    pixels = task.get("canvas")
    patch = model.get("patch")
    if isinstance(pixels, int) and isinstance(patch, int) and patch > 0:  # the parameters may be those of any plugin
        data.append(f"{pixels} x {pixels} pixels in {(pixels // patch) ** 2} patches")
    tests = dense.loc[dense[ITEMS] > 0, [LABELS, ITEMS]].drop_duplicates()
    if len(tests):
        classes: set[int] = set()
        for labels, n in tests.itertuples(index=False):
            classes.update(numbers_of(labels, n).tolist())
        data.append(f"{len(classes)} classes")
        data.append(f"{tests[ITEMS].iloc[0]:,} test {items_of(setting)} for each network")
    rule = numbering(task)
    if rule:
        data.append(f"class folders are numbered {rule}")

    size = [f"{name} {model[name]}" for name in ("depth", "dim", "heads", "patch") if name in model]
    weights = dense["parameters"].mean()
    if weights > 0:
        size.append(f"{weights / 1e6:.2g} M weights")
    if model.get("precision") == "bfloat16":
        size.append("in bfloat16")
    if setting.networks:
        size.append(few(sorted(setting.networks.values()), NAMED))
    number = len(setting.seeds)
    networks = f"{number or 'no'} network{'' if number == 1 else 's'} of model {setting.model}"
    if size:
        networks = f"{networks} ({', '.join(size)})"
    track = TRACKS.get(setting.track, setting.track)
    return plain(f"Data: {', '.join(data)}. {networks}, {track} (track {setting.track}).", 1000)
