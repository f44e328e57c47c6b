"""From records to a leaderboard: ranked rows for each strategy and budget, and for each strategy over its budgets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from sparsebench.board import columns
from sparsebench.board.columns import BY_KEY, EVERY, NOT_RANKED, Column, interval_row
from sparsebench.board.settings import (
    DENSE,
    MAIN,
    ON_BACKGROUND,
    PRETRAINING,
    SEED,
    TRACK,
    Flats,
    Setting,
    dense_of,
    frame_of,
    metrics_of,
    over_seeds,
    settings_of,
    speed_ups,
)
from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind
from sparsebench.stats import curves, paired
from sparsebench.stats.intervals import Successes, mean_interval, n50_ratio, sample_complexity
from sparsebench.stats.paired import Contender, Pairs, marks
from sparsebench.strategy.budget import amount_of
from sparsebench.tasks.sources.labels import numbering
from sparsebench.testing.reports import CHECKS, SEVERAL, UNCHECKED

RANDOM = "random_inside"
"""The baseline that each row is compared with at its own budget, besides dense."""
HALF = 0.5
NOTHING = {CHECKS: UNCHECKED, "badge": "", "track": TRACK, "class_folders": ""}
"""Values that are as uninformative as missing ones: an optional column is left out if it has no others."""


class Curves(NamedTuple):
    """The strategies of one setting over their budgets.

    Attributes:
        budgets: requested shares of dense MACs, falling.
        middle: the budget that is nearest to one half.
        rows: one row for each strategy, dense first. Besides the values over all budgets, a row has those of the
            strategy at `middle`.
        pairs: comparisons of the ranked strategies by the areas under their curves.
    """

    budgets: tuple[float, ...]
    middle: float
    rows: pd.DataFrame
    pairs: Pairs


class Ranking(NamedTuple):
    """The ranked rows of one setting.

    Attributes:
        parts: the setting that each part of the columns is taken from, see `Column.part`. Part "accuracy" also covers
            cost and ranks.
        rows: the ranked rows.
        pairs: pairwise comparisons of the ranked rows.
        every: all rows in order, oracles last. Besides the board's columns they have `macs`; `asked`, the requested
            share of dense MACs; and `line`, the name of the curve that has the row as a point, if any.
        curves: the strategies over their budgets, if they have several.
    """

    parts: Mapping[str, Setting]
    rows: pd.DataFrame
    pairs: Pairs
    every: pd.DataFrame
    curves: Curves | None

    @property
    def setting(self) -> Setting:
        """The setting of the ranking."""
        return self.parts["accuracy"]

    @property
    def task(self) -> str:
        """The name of the setting's task."""
        return self.setting.task


class Leaderboard(NamedTuple):
    """The rows of a leaderboard, ranked rows first and oracles last, with their rankings.

    Attributes:
        rankings: one ranking, of the main task; or one for each task and model if `by_task`.
        columns: columns of the rows. In a board over all tasks they name the task that they were taken from.
        by_task: whether tasks and models have separate rows.
        settings: all settings of the records, also those that are not on the board.
    """

    rankings: Sequence[Ranking] = ()
    columns: Sequence[Column] = EVERY
    by_task: bool = False
    settings: Sequence[Setting] = ()

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all rankings."""
        tables = [ranking.every for ranking in self.rankings]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns.keys_of(self.columns))

    @property
    def parts(self) -> Mapping[str, Setting]:
        """The setting of each part of the columns; empty for a board by task."""
        return {} if self.by_task or not self.rankings else self.rankings[0].parts

    @property
    def over_budgets(self) -> Ranking | None:
        """The first ranking with several budgets."""
        return next((ranking for ranking in self.rankings if ranking.curves is not None), None)


@threadpool_limits.wrap(limits=1, user_api="blas")  # the matrices are small: several threads are slower
def judge(records: Flats, by: str | None = None, judged: Leaderboard | None = None) -> Leaderboard:
    """Return the leaderboard of records.

    A board over all tasks uses one setting of each task: the setting with the most strategies, and of these the one
    with the most records, and not the latest, as the same cells must give the same board. These settings are ordered:
    main tasks of suites first, then tasks without trials, then by falling number of records. Each part of the columns
    is taken from the first setting that has it, and its columns name that task.

    Args:
        records: flat records; only records with status ok have rows.
        by: None for rows over all tasks, "task" for separate rows for each task and model.
        judged: another leaderboard of the same records; rankings that both have are not computed again.

    Raises:
        UserError: `by` has another value.
    """
    if by not in (None, "task"):
        raise UserError("--by", got=f"'{by}'", allowed="task")
    frame = frame_of(records)
    failed = frame.loc[~frame["status"].isin(("ok", "unsupported")), ["strategy", "budget"]]
    lossy = set(failed.itertuples(index=False, name=None))
    settings = settings_of(frame) if judged is None else judged.settings
    computed = () if judged is None else judged.rankings
    kinds, mains = metrics_of(frame), frame.attrs.get(MAIN, ())
    if by:
        groups = [[setting] for setting in settings]
    else:
        ordered = sorted(
            settings,
            key=lambda setting: (
                setting.entries["strategy"].nunique(),
                len(setting.measured),
                setting.n_train,
                setting.setting,
                setting.track,
            ),
        )
        tasks = {setting.source: setting for setting in ordered}
        if len(tasks) > 1:
            tasks.pop(PRETRAINING, None)
        groups = (
            [
                sorted(
                    tasks.values(),
                    key=lambda setting: (
                        mains.index(setting.source) if setting.source in mains else len(mains),
                        setting.has_trials,
                        -len(setting.measured),
                        setting.source,
                    ),
                )
            ]
            if tasks
            else []
        )
    rankings = []
    for group in groups:
        parts = {"accuracy": group[0]}
        for setting in reversed(group):
            parts |= {"sample complexity": setting} if setting.has_trials else {}
            parts |= {"spurious gap": setting} if setting.has("spurious_gap") else {}
            parts |= {kind.name: setting for kind in kinds if setting.has(kind.name)}
        equal = (setting for setting in computed if setting.parts == parts)
        rankings.append(next(equal, None) or _rank(parts, kinds, lossy))
    board = Leaderboard(rankings, EVERY, by is not None, settings)
    rows = board.rows
    filled = set(rows.dropna(axis="columns", how="all"))
    filled -= {key for key, nothing in NOTHING.items() if (rows[key] == nothing).all()}
    visible = []
    for column in (*EVERY, *map(columns.column_of, kinds)):
        if column not in columns.BY_TASK and (column.key in filled or column in columns.COLUMNS):
            of_task = board.parts[column.part].task if column.key in filled and column.part in board.parts else ""
            visible.append(column._replace(task=of_task))
    return board._replace(columns=[*columns.BY_TASK, *visible] if by else visible)


def _rows(parts: Mapping[str, Setting], kinds: Sequence[MetricKind]) -> pd.DataFrame:
    """Return a row for each strategy and budget; each part of the columns is computed from its own setting."""
    main, tested = parts["accuracy"], parts["accuracy"].tested
    measured = [setting.records if part == "sample complexity" else setting.tested for part, setting in parts.items()]
    every = pd.concat([part[["entry", "trained", CHECKS, "badge"]] for part in measured])
    rows = main.every.loc[np.unique(every["entry"])]
    seeds = [part.groupby("entry")[SEED].nunique() for part in measured]
    aggregation = dict.fromkeys(("accuracy", "macs", "macs_ratio", "selection_auroc"), "mean") | {
        "images_per_s": "median"
    }
    tables = [over_seeds(tested, aggregation)]
    if "sample complexity" in parts:
        trials = _trials(parts["sample complexity"])
        seeds.append(trials.pop("n_seeds"))
        tables.append(trials)
    if "spurious gap" in parts:
        tables.append(_gaps(parts["spurious gap"]))
    tables += [
        over_seeds(parts[kind.name].tested, {kind.name: kind.over_seeds}) for kind in kinds if kind.name in parts
    ]
    rows = rows.join(tables)
    devices = tested[tested["images_per_s"].notna()].groupby("entry")["device"]
    rows["device"] = devices.agg(lambda names: ", ".join(sorted(set(names)))) if len(devices) else None
    rows["n_seeds"] = pd.concat(seeds, axis=1).min(axis=1).astype(int)
    for name, otherwise in (("trained", ""), (CHECKS, SEVERAL), ("badge", "")):  # if versions differ
        values = every[name].astype(str).groupby(every["entry"])
        rows[name] = values.first().where(values.nunique() == 1, otherwise)
    rows["rank"] = NOT_RANKED
    rows["track"], rows["class_folders"] = main.track, numbering(main.params[0])
    rows["task"], rows["model"], rows["n_train"] = main.task, main.model, main.largest
    return rows.reindex(columns=list(dict.fromkeys([*columns.keys_of(EVERY), *rows])))


def _trials(setting: Setting) -> pd.DataFrame:
    """Return the columns of sample complexity for each entry, with the number of complete repetitions as n_seeds."""
    records = setting.records[["entry", "repetition", "n_train", "success", "success_loss"]]
    groups = {entry: part for entry, part in records.groupby("entry") if part["success"].notna().any()}
    trials = {entry: _successes(part, "success") for entry, part in groups.items()}
    dense = trials.get(dense_of(setting.records)["entry"].min())
    rows = {}
    for entry, successes in trials.items():
        rows[entry] = {"n_seeds": len(successes.seeds)} | interval_row(
            "sample_complexity", sample_complexity(successes)
        )
        if groups[entry]["success_loss"].notna().any():
            by_loss = _successes(groups[entry], "success_loss")
            rows[entry] |= interval_row("sample_complexity_loss", sample_complexity(by_loss))
        if dense is not None and math.isfinite(dense.n50):
            rows[entry] |= interval_row("sample_complexity_ratio", n50_ratio(successes, dense))
    return pd.DataFrame.from_dict(rows, orient="index")


def _successes(records: pd.DataFrame, metric: str) -> Successes:
    return Successes.of(*(records[name].to_numpy() for name in ("repetition", "n_train", metric)))


def _gaps(setting: Setting) -> pd.DataFrame:
    """Return the columns of gaps for each entry; `aligned_gap` only if the task has groups on backgrounds."""
    tested = setting.tested
    values = tested.groupby(["entry", SEED])["spurious_gap"].mean().unstack().dropna(how="all")
    dense = dense_of(tested)["entry"].min()
    rows = over_seeds(tested, dict.fromkeys(("spurious_gap", "worst_group_accuracy", "accuracy"), "mean"))
    rows = rows.loc[values.index].rename(columns={"accuracy": "accuracy_with_gap"})
    entries = [setting.contenders[entry] for entry in rows.index]
    worst = pd.Series([curves.worst_group(*entry) for entry in entries], rows.index, dtype=float)
    rows["worst_group_accuracy"] = worst.fillna(rows["worst_group_accuracy"])
    intervals = {}
    if dense in values.index:
        reductions = (values.loc[dense] - values).apply(lambda row: row.dropna().tolist(), axis=1)
        intervals["spurious_gap_reduction"] = [mean_interval(pairs) if pairs else None for pairs in reductions]
    if sum(setting.has(name) for name in tested if ON_BACKGROUND.fullmatch(name)) == 4:
        contenders, groups = [contender for contender, _ in entries], [of_items for _, of_items in entries]
        intervals["aligned_gap"] = curves.aligned_gaps(contenders, groups, setting.lone)
        if dense in setting.contenders:
            contender = setting.contenders[dense][0]
            intervals["aligned_gap_reduction"] = curves.gap_reductions(contenders, contender, groups, setting.lone)
    for name, of_entries in intervals.items():
        rows = rows.join(
            pd.DataFrame([interval_row(name, interval) for interval in of_entries], rows.index, dtype=float)
        )
    return rows


def _rank(parts: Mapping[str, Setting], kinds: Sequence[MetricKind], lossy: Collection[tuple[str, str]]) -> Ranking:
    """Return the rows in order, with ranks, differences to baselines, Pareto fronts and values over budgets.

    Oracles are not ranked. Strategies with missing or failed cells are not ranked either, as their remaining cells are
    a biased sample. Strategies that lack cells do not contribute to the pooled variance.
    """
    rows, main = _rows(parts, kinds), parts["accuracy"]
    common = main.common
    lost = rows["strategy"].isin([name for name, _ in lossy]) if common.budgets else False
    pairs_of_names = rows[["strategy", "budget"]].itertuples(index=False, name=None)
    lost |= pd.Series([pair in lossy for pair in pairs_of_names], rows.index)
    unranked = rows.index[lost | rows.index.isin(common.apart) | common.dense]
    measured = rows[rows["accuracy"].notna()]
    contenders = [main.contenders[entry][0] for entry in measured.index]
    all_pairs = paired.compare(contenders, np.flatnonzero(measured.index.isin(common.apart)).tolist())
    judged = ~measured.index.isin(unranked)
    places = np.flatnonzero(judged & (measured["kind"] != "oracle"))
    rows.loc[measured.index, ["accuracy_low", "accuracy_high"]] = np.clip(all_pairs.accuracy, 0, 1)
    dense = np.flatnonzero(measured["strategy"] == DENSE).tolist()
    references = {place: dense[0] for place in range(len(measured))} if dense else {}
    _compare(rows, measured.index, all_pairs, judged, DENSE, "accuracy_delta", references)
    _compare(rows, measured.index, all_pairs, judged, RANDOM, f"{RANDOM}_delta", _places_of_random(measured))
    ranked, pairs = measured.index[places], all_pairs.among(places.tolist())
    rows.loc[ranked, "rank"] = pairs.ranks()
    # A row is on a Pareto front if no row that costs no more is significantly better. Costs are MACs, or the speed on
    # one machine.
    machines: dict[int, set[object]] = defaultdict(set)
    for entry, *machine in main.tested[["entry", "device", "environment"]].drop_duplicates().itertuples(index=False):
        machines[entry].add(tuple(machine))
    same_machine = [[machines[entry] == machines[other] for other in ranked] for entry in ranked]
    better = pairs.better()
    for column, cost, comparable in (
        ("pareto", rows["macs_ratio"], np.ones_like(better)),
        ("pareto_speed", -rows["images_per_s"], np.array(same_machine, dtype=bool).reshape(better.shape)),
    ):
        costs = cost[ranked].to_numpy(float)
        beaten = (better & (costs[:, None] <= costs) & comparable).any(axis=0)
        rows[column] = pd.Series(np.where(beaten, "no", "yes"), ranked, dtype=object)[~np.isnan(costs)]
    order = {"oracle": rows["kind"] == "oracle", "last": rows["rank"] == NOT_RANKED, "a": -rows["accuracy"]}
    rows = rows.loc[pd.DataFrame(order).sort_values(list(order)).index]
    rows, over = _curves(main, rows, unranked)
    return Ranking(parts, rows.loc[ranked], pairs, rows, over)


def _places_of_random(rows: pd.DataFrame) -> dict[int, int]:
    """Return for the position of each row the position of its `random_inside` row at the same budget, if any.

    A `random_inside` row with the same blocks is preferred to one with other blocks and the same amount.
    """
    budgets, places = rows["budget"].tolist(), dict[str, int]()
    for i in reversed(np.flatnonzero(rows["strategy"] == RANDOM).tolist()):
        places |= {budgets[i]: i, amount_of(budgets[i]): i}
    counterparts = [places.get(budget, places.get(amount_of(budget))) for budget in budgets]
    return {i: j for i, j in enumerate(counterparts) if j is not None}


def _compare(
    rows: pd.DataFrame,
    measured: pd.Index,
    pairs: Pairs,
    judged: np.ndarray,
    name: str,
    delta: str,
    references: Mapping[int, int],
) -> None:
    """Add differences to reference rows, with intervals and marks that are corrected for all of these comparisons.

    `references` has the position of the reference by the position of the row, both in `measured`, the index of the rows
    that `pairs` compares. A row has a difference if its reference has all of its seeds: the difference is then that of
    the accuracies. Rows that are not `judged` have no mark.
    """
    references = {i: j for i, j in references.items() if pairs.n_seeds[i, j] == pairs.n_seeds[i, i]}
    i, j = list(references), list(references.values())
    mean, half = pairs.mean[i, j], pairs.half[i, j]
    ends = np.clip(np.stack([mean, mean - half, mean + half], axis=1), -1, 1) + 0.0  # no minus zero
    rows.loc[measured[i], [delta, f"{delta}_low", f"{delta}_high"]] = ends
    marked = {i: j for i, j in references.items() if i != j and judged[i] and judged[j]}
    rows[f"versus_{name}"] = pd.Series({measured[i]: mark for i, mark in marks(pairs, marked).items()}, dtype=object)


def points_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return for each curve the rows with fewer MACs than dense, by rising MACs."""
    below = rows[rows["macs_ratio"] < 1].sort_values(["macs_ratio", "asked"])
    return {str(name): points for name, points in below.groupby("line")}


def _curves(main: Setting, rows: pd.DataFrame, unranked: Collection[int]) -> tuple[pd.DataFrame, Curves | None]:
    """Return the rows with the columns of their curves, and the curves.

    Curves are None if no strategy has two budgets in shares of dense MACs, or if dense was not measured.

    Args:
        main: the setting of the rows.
        rows: a row for each strategy and budget, in order.
        unranked: entries that are not ranked because of missing or failed cells.
    """
    measured = rows[rows["accuracy"].notna() & rows["macs_ratio"].notna()]
    dense = measured.index[measured["strategy"] == DENSE][:1]
    if dense.empty or not measured.dropna(subset="line").duplicated("line").any():
        return rows.assign(line=None), None
    # A curve has the name of its strategy. If a strategy has several, their names include the rest of the budget.
    labels = sorted(set(measured["line"].dropna()))
    alike = Counter(line[:2] for line in labels)
    names_of_lines = {line: f"{line[0]} {line[2]}" if alike[line[:2]] > 1 and line[2] else line[0] for line in labels}
    disposals = main.tested["how"].astype(str).groupby(main.tested["entry"])
    rows = rows.assign(
        line=measured["line"].map(names_of_lines.get).astype(object),
        **{
            "how": disposals.first().where(disposals.nunique() == 1, ""),
            "speed_up": speed_ups(main.tested),
            "p_label": over_seeds(main.tested, {"p_label": "mean"})["p_label"],
        },
    )
    rows.loc[dense, "line"], rows.loc[dense, "asked"] = DENSE, 1.0
    points = rows.dropna(subset="line")
    budgets = tuple(sorted(set(points["asked"]) - {1.0}, reverse=True))
    common = main.common.budgets
    middle = min(common or budgets, key=lambda budget: (abs(budget - HALF), budget))
    compared = points[points["asked"].isin(common) | (points["line"] == DENSE)]
    heights, of_lines = _heights(main, compared, common)
    rows = rows.drop(columns=[name for name in of_lines if name in rows]).join(of_lines, on="line")
    points = rows.dropna(subset="line")
    compared = points.loc[compared.index]

    # One row for each strategy: its values at the middle budget, values of its curve, and its accuracy at each budget.
    first = points.drop_duplicates("line").set_index("line")
    table = points[(points["asked"] == middle) | (points["line"] == DENSE)].set_index("line").reindex(first.index)
    of_strategy = [BY_KEY[key] for key in ("kind", "how", "kept_accuracy", "macs_at_2", CHECKS, "badge")]
    shared = [key for key in (*columns.keys_of(of_strategy), "macs_at_2_at_most") if key in first]
    table = table.assign(**first[shared], rank=NOT_RANKED, strategy=table.index)
    seeds = {
        line: set.intersection(*(set(main.contenders[entry][0].means) for entry in points.index))
        for line, points in compared.groupby("line")
    }
    table["n_seeds"] = table.index.map(lambda line: len(seeds.get(line, ())))
    # At a budget that is not common, a point may have fewer seeds than the others: then it has only its own row.
    besides = points.index.difference(compared.index)
    alike = points.drop(besides[besides.isin(main.common.apart)])
    for budget in budgets:
        rows_at, key = alike[alike["asked"] == budget].set_index("line"), columns.accuracy_at(budget).key
        missed = (rows_at["macs_ratio"] / budget - 1).abs() > columns.TOLERANCE
        table = table.assign(**{key: rows_at["accuracy"], f"{key}_spent": rows_at["macs_ratio"].where(missed)})
    names = list(heights)
    unfair, lacking = (set(compared.loc[compared.index.isin(some), "line"]) for some in (unranked, main.common.apart))
    ranked = [k for k, name in enumerate(names) if name not in unfair and table.loc[name, "kind"] != "oracle"]
    pairs = paired.compare(list(heights.values()), [k for k, name in enumerate(names) if name in lacking]).among(ranked)
    table.loc[[names[k] for k in ranked], "rank"] = pairs.ranks()
    rows["kept_accuracy_rank"] = rows["line"].map(table["rank"])
    order = {
        "not dense": table.index != DENSE,
        "oracle": table["kind"] == "oracle",
        "last": table["rank"] == NOT_RANKED,
        "kept": -table["kept_accuracy"],
        "name": table.index,
    }
    table = table.loc[pd.DataFrame(order, table.index).sort_values(list(order)).index]
    return rows, Curves(budgets, middle, table, pairs)


def _heights(main: Setting, rows: pd.DataFrame, budgets: Sequence[float]) -> tuple[dict[str, Contender], pd.DataFrame]:
    """Return mean accuracies, by which curves are ranked, and kept accuracy and MACs at -2 points.

    Only curves with a point at the lowest budget have them. A height also needs that this point spends less than the
    next budget.

    Args:
        main: the setting of the rows.
        rows: the points of all curves at the budgets, and of dense.
        budgets: the budgets over which curves are compared.
    """
    dense = main.contenders[rows.index[rows["line"] == DENSE][0]][0]
    heights, by_name = {}, {DENSE: {"kept_accuracy": 1.0, "macs_at_2": 1.0}}
    lowest, following, *_ = *sorted(budgets), 1.0, 1.0
    lowest_spent = rows[rows["asked"] == lowest].groupby("line")["macs_ratio"].min()
    for name, points in points_of(rows).items():
        spent = points["macs_ratio"].tolist()
        contenders = [*(main.contenders[entry][0] for entry in points.index), dense]
        if name not in lowest_spent or (height := curves.area(contenders, spent, lowest)) is None:
            continue
        if lowest_spent[name] < following:
            heights[name] = height
        by_name[name] = interval_row("macs_at_2", curves.least_macs(contenders, spent, main.lone))
        by_name[name] |= {"macs_at_2_at_most": True} if by_name[name]["macs_at_2"] == spent[0] else {}
    kept = curves.kept_accuracy(list(heights.values()), dense, main.lone)
    for place, name in enumerate(heights):
        by_name[name] |= interval_row("kept_accuracy", kept[place])
    return heights, pd.DataFrame.from_dict(by_name, orient="index")
