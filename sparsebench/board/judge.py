"""From records to a leaderboard: ranked rows for each strategy and budget, and for each strategy over its budgets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from sparsebench.board import columns
from sparsebench.board.columns import BY_KEY, EVERY, NOT_RANKED, RANK_ENDS, Column, interval_row, rank_text
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
from sparsebench.records.reports import CHECKS, SEVERAL, UNCHECKED
from sparsebench.stats import curves, paired
from sparsebench.stats.intervals import Successes, mean_interval, n50_ratio, sample_complexity
from sparsebench.stats.paired import Contender, Pairs, marks
from sparsebench.tasks.sources.labels import numbering

RANDOM = "random_inside"
"""The baseline that each row is compared with at its own budget, besides dense."""
HALF = 0.5
AMOUNT = ["budget_amount", "budget_value", "budget_rounding", "budget_where"]
"""Columns that say what a budget is, apart from blocks and schedule."""
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
    kinds = metrics_of(frame)
    settings = settings_of(frame) if judged is None else judged.settings
    computed = () if judged is None else judged.rankings
    incomplete = frame[~frame["status"].isin(("ok", "unsupported"))]
    lossy = set(incomplete[["strategy", "budget"]].itertuples(index=False, name=None))

    if by == "task":
        groups = [[setting] for setting in settings]
    else:
        chosen = _one_of_each_task(settings, frame.attrs.get(MAIN, ()))
        groups = [chosen] if chosen else []

    rankings = []
    for group in groups:
        parts = _parts(group, kinds)
        equal = next((ranking for ranking in computed if ranking.parts == parts), None)
        rankings.append(equal or _rank(parts, kinds, lossy))
    board = Leaderboard(rankings, EVERY, by is not None, settings)
    visible = _visible(board, kinds)
    return board._replace(columns=[*columns.BY_TASK, *visible] if by else visible)


def _one_of_each_task(settings: Sequence[Setting], mains: Sequence[str]) -> list[Setting]:
    """Return the settings of a board over all tasks, in order, see `judge`.

    Args:
        settings: all settings.
        mains: the main tasks of suites.
    """

    def size(setting: Setting) -> tuple[int, int, int, str, str]:
        n_strategies = setting.entries["strategy"].nunique()
        return n_strategies, len(setting.measured), setting.n_train, setting.setting, setting.track

    def place(setting: Setting) -> tuple[int, bool, int, str]:
        place_of_main = mains.index(setting.source) if setting.source in mains else len(mains)
        return place_of_main, setting.has_trials, -len(setting.measured), setting.source

    of_task: dict[str, Setting] = {}
    for setting in sorted(settings, key=size):
        of_task[setting.source] = setting  # the last one is the largest
    # The pretraining task trains networks for other tasks: it is on the board only if there is no other.
    if len(of_task) > 1:
        of_task.pop(PRETRAINING, None)
    return sorted(of_task.values(), key=place)


def _parts(group: Sequence[Setting], kinds: Sequence[MetricKind]) -> dict[str, Setting]:
    """Return the setting of each part of the columns: the first of the group that has it."""
    parts = {"accuracy": group[0]}
    for setting in reversed(group):
        if setting.has_trials:
            parts["sample complexity"] = setting
        if setting.has("spurious_gap"):
            parts["spurious gap"] = setting
        for kind in kinds:
            if setting.has(kind.name):
                parts[kind.name] = setting
    return parts


def _visible(board: Leaderboard, kinds: Sequence[MetricKind]) -> list[Column]:
    """Return the columns that every board has, and the others in which a row says something.

    A column with a value names the task that it was taken from.
    """
    rows = board.rows
    filled = set(rows.dropna(axis="columns", how="all"))
    for key, nothing in NOTHING.items():
        if (rows[key] == nothing).all():
            filled.discard(key)
    visible = []
    for column in (*EVERY, *map(columns.column_of, kinds)):
        if column in columns.BY_TASK:
            continue
        if column.key in filled:
            task = board.parts[column.part].task if column.part in board.parts else ""
            visible.append(column._replace(task=task))
        elif column in columns.COLUMNS:
            visible.append(column._replace(task=""))
    return visible


def _rows(parts: Mapping[str, Setting], kinds: Sequence[MetricKind]) -> pd.DataFrame:
    """Return a row for each strategy and budget; each part of the columns is computed from its own setting."""
    main = parts["accuracy"]
    tested = main.tested
    # Trials use all numbers of training samples, everything else only the largest.
    measured = [setting.records if part == "sample complexity" else setting.tested for part, setting in parts.items()]
    every = pd.concat([records[["entry", "trained", CHECKS, "badge"]] for records in measured])
    seeds = [records.groupby("entry")[SEED].nunique() for records in measured]

    means = ("accuracy", "macs", "macs_ratio", "selection_auroc")
    tables = [over_seeds(tested, {**dict.fromkeys(means, "mean"), "images_per_s": "median"})]
    if "sample complexity" in parts:
        trials = _trials(parts["sample complexity"])
        seeds.append(trials.pop("n_seeds"))
        tables.append(trials)
    if "spurious gap" in parts:
        tables.append(_gaps(parts["spurious gap"]))
    for kind in kinds:
        if kind.name in parts:
            tables.append(over_seeds(parts[kind.name].tested, {kind.name: kind.over_seeds}))
    rows = main.every.loc[np.unique(every["entry"])].join(tables)

    devices = tested[tested["images_per_s"].notna()].groupby("entry")["device"]
    rows["device"] = devices.agg(lambda names: ", ".join(sorted(set(names)))) if len(devices) else None
    # A row has as many seeds as the part with the fewest.
    rows["n_seeds"] = pd.concat(seeds, axis=1).min(axis=1).astype(int)
    # Several versions of a strategy can have records. If they differ, the row has none of their values.
    for name, otherwise in (("trained", ""), (CHECKS, SEVERAL), ("badge", "")):
        values = every[name].astype(str).groupby(every["entry"])
        rows[name] = values.first().where(values.nunique() == 1, otherwise)
    rows[["rank", *RANK_ENDS]] = NOT_RANKED, math.nan, math.nan
    rows["track"] = main.track
    rows["class_folders"] = numbering(main.params[0])
    rows["task"] = main.task
    rows["model"] = main.model
    rows["n_train"] = main.largest
    order = dict.fromkeys([*columns.keys_of(EVERY), *rows])
    return rows.reindex(columns=list(order))


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
    rows = _rows(parts, kinds)
    main = parts["accuracy"]
    common = main.common

    # A strategy that is compared over budgets is ranked at all of them or at none.
    pairs_of_names = rows[["strategy", "budget"]].itertuples(index=False, name=None)
    lost = np.array([pair in lossy for pair in pairs_of_names], dtype=bool)
    if common.budgets:
        lost |= rows["strategy"].isin([name for name, _ in lossy]).to_numpy()
    unranked = rows.index[lost | rows.index.isin(common.apart) | common.dense]

    measured = rows[rows["accuracy"].notna()]
    contenders = [main.contenders[entry][0] for entry in measured.index]
    outsiders = np.flatnonzero(measured.index.isin(common.apart)).tolist()
    all_pairs = paired.compare(contenders, outsiders)
    rows.loc[measured.index, ["accuracy_low", "accuracy_high"]] = np.clip(all_pairs.accuracy, 0, 1)

    # Oracles have marks but no rank.
    judged = ~measured.index.isin(unranked)
    places_of_dense = np.flatnonzero(measured["strategy"] == DENSE).tolist()
    references = dict.fromkeys(range(len(measured)), places_of_dense[0]) if places_of_dense else {}
    _compare(rows, measured.index, all_pairs, judged, DENSE, "accuracy_delta", references)
    _compare(rows, measured.index, all_pairs, judged, RANDOM, f"{RANDOM}_delta", _places_of_random(measured))

    places = np.flatnonzero(judged & (measured["kind"] != "oracle"))
    ranked = measured.index[places]
    pairs = all_pairs.among(places.tolist())
    _add_ranks(rows, ranked, pairs)
    _add_fronts(rows, main, ranked, pairs)

    rows = _in_order(
        rows,
        {
            "oracle": rows["kind"] == "oracle",
            "not ranked": rows["rank_low"].isna(),
            "accuracy": -rows["accuracy"],
        },
    )
    rows, over_budgets = _curves(main, rows, unranked)
    return Ranking(parts, rows.loc[ranked], pairs, rows, over_budgets)


def _add_ranks(rows: pd.DataFrame, ranked: Sequence[Any], pairs: Pairs) -> None:
    """Write the ranks of the rows that `pairs` compares, as numbers and as text."""
    ends = pairs.ranks()
    rows.loc[ranked, list(RANK_ENDS)] = ends
    rows.loc[ranked, "rank"] = [rank_text(low, high) for low, high in ends]


def _in_order(rows: pd.DataFrame, keys: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows sorted by several keys, each with a value for each row."""
    table = pd.DataFrame(keys, rows.index)
    return rows.loc[table.sort_values(list(keys)).index]


def _add_fronts(rows: pd.DataFrame, main: Setting, ranked: pd.Index, pairs: Pairs) -> None:
    """Add to `rows` whether the ranked ones are on the Pareto fronts of accuracy and MACs, and of accuracy and speed.

    A row is on a front if no row that costs no more is significantly better.
    """
    better = pairs.better()
    rows["pareto"] = _front(rows.loc[ranked, "macs_ratio"], better)

    # Speeds are comparable only if they were measured on the same machines.
    machines: dict[int, set[object]] = defaultdict(set)
    tested = main.tested[["entry", "device", "environment"]].drop_duplicates()
    for entry, device, environment in tested.itertuples(index=False):
        machines[entry].add((device, environment))
    same_machines = np.zeros_like(better)
    for i, entry in enumerate(ranked):
        for j, other in enumerate(ranked):
            same_machines[i, j] = machines[entry] == machines[other]
    rows["pareto_speed"] = _front(-rows.loc[ranked, "images_per_s"], better & same_machines)


def _front(costs: pd.Series, better: np.ndarray) -> pd.Series:
    """Return "yes" for each row that no better row beats at the same or a lower cost, else "no".

    Args:
        costs: (R,) the costs; a row with NaN has no value.
        better: (R, R) whether the row is better than the column.
    """
    values = costs.to_numpy(float)
    costs_no_more = values[:, None] <= values
    beaten = (better & costs_no_more).any(axis=0)
    return pd.Series(np.where(beaten, "no", "yes"), costs.index, dtype=object)[~np.isnan(values)]


def _places_of_random(rows: pd.DataFrame) -> dict[int, int]:
    """Return for the position of each row the position of its `random_inside` row at the same budget, if any.

    A `random_inside` row with the same blocks is preferred to one with other blocks and the same amount.
    """
    budgets = rows["budget"].tolist()
    amounts = list(rows[AMOUNT].itertuples(index=False, name=None))
    with_budget: dict[str, int] = {}
    with_amount: dict[tuple[str, ...], int] = {}
    for place in np.flatnonzero(rows["strategy"] == RANDOM).tolist():
        with_budget.setdefault(budgets[place], place)
        with_amount.setdefault(amounts[place], place)
    places = {}
    for place, (budget, amount) in enumerate(zip(budgets, amounts, strict=True)):
        counterpart = with_budget.get(budget, with_amount.get(amount))
        if counterpart is not None:
            places[place] = counterpart
    return places


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

    # From here on `line` is the name of the curve. Dense is a curve with one point.
    names_of_curves = _names_of_curves(set(measured["line"].dropna()))
    rows = rows.assign(line=measured["line"].map(names_of_curves.get).astype(object))
    rows.loc[dense, "line"] = DENSE
    rows.loc[dense, "asked"] = 1.0
    disposals = main.tested["how"].astype(str).groupby(main.tested["entry"])
    rows["how"] = disposals.first().where(disposals.nunique() == 1, "")  # "" if versions differ
    rows["speed_up"] = speed_ups(main.tested)
    rows["p_label"] = over_seeds(main.tested, {"p_label": "mean"})["p_label"]

    # Curves are compared over the common budgets only: a mean over other budgets would be another quantity.
    points = rows.dropna(subset="line")
    common = main.common.budgets
    compared = points.index[points["asked"].isin(common) | (points["line"] == DENSE)]
    heights, of_curves = _heights(main, points.loc[compared], common)
    rows = rows.drop(columns=[name for name in of_curves if name in rows]).join(of_curves, on="line")
    points = rows.dropna(subset="line")

    budgets = tuple(sorted(set(points["asked"]) - {1.0}, reverse=True))
    middle = min(common or budgets, key=lambda budget: (abs(budget - HALF), budget))
    table = _rows_of_curves(main, points, compared, budgets, middle)

    # A curve is ranked by its height, unless a point that counts for it is not ranked. Oracles are not ranked.
    names = list(heights)
    line_of_point = points.loc[compared, "line"]
    lacking = set(line_of_point[compared.isin(main.common.apart)])
    unfair = set(line_of_point[compared.isin(unranked)])
    outsiders = [place for place, name in enumerate(names) if name in lacking]
    all_pairs = paired.compare(list(heights.values()), outsiders)
    ranked = []
    for place, name in enumerate(names):
        if name not in unfair and table.loc[name, "kind"] != "oracle":
            ranked.append(place)
    pairs = all_pairs.among(ranked)
    _add_ranks(table, [names[place] for place in ranked], pairs)
    rows["kept_accuracy_rank"] = rows["line"].map(table["rank"])

    table = _in_order(
        table,
        {
            "not dense": table.index != DENSE,
            "oracle": table["kind"] == "oracle",
            "not ranked": table["rank_low"].isna(),
            "kept accuracy": -table["kept_accuracy"],
            "name": table.index,
        },
    )
    return rows, Curves(budgets, middle, table, pairs)


def _names_of_curves(lines: Collection[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """Return the names of curves: that of the strategy, with the rest of the budget if the strategy has several.

    Args:
        lines: the curves, see `Setting.every`.
    """
    n_curves = Counter((strategy, kind) for strategy, kind, _ in lines)
    names = {}
    for strategy, kind, rest in lines:
        has_others = n_curves[strategy, kind] > 1
        names[strategy, kind, rest] = f"{strategy} {rest}" if has_others and rest else strategy
    return names


def _rows_of_curves(
    main: Setting, points: pd.DataFrame, compared: pd.Index, budgets: Sequence[float], middle: float
) -> pd.DataFrame:
    """Return a row for each curve: its values at the middle budget, those of the curve, and accuracies at all budgets.

    Args:
        main: the setting of the rows.
        points: the points of all curves, and dense.
        compared: the entries of the points at common budgets, and of dense.
        budgets: all budgets.
        middle: the budget that is nearest to one half.
    """
    first = points.drop_duplicates("line").set_index("line")
    at_middle = points[(points["asked"] == middle) | (points["line"] == DENSE)]
    table = at_middle.set_index("line").reindex(first.index)
    # These values belong to the whole curve: a curve without a point at the middle budget has them too.
    of_curve = [BY_KEY[key] for key in ("kind", "how", "kept_accuracy", "macs_at_2", CHECKS, "badge")]
    shared = [key for key in (*columns.keys_of(of_curve), "macs_at_2_at_most") if key in first]
    table = table.assign(**first[shared])
    table[["rank", *RANK_ENDS]] = NOT_RANKED, math.nan, math.nan
    table["strategy"] = table.index

    # A curve has the seeds that all of its compared points have.
    n_seeds = dict.fromkeys(table.index, 0)
    for name, of_points in points.loc[compared].groupby("line"):
        seeds = [set(main.contenders[entry][0].means) for entry in of_points.index]
        n_seeds[name] = len(set.intersection(*seeds))
    table["n_seeds"] = table.index.map(n_seeds)

    # At a budget that is not common, a point may have fewer seeds than the others: then it has only its own row.
    only_own_row = ~points.index.isin(compared) & points.index.isin(main.common.apart)
    shown = points[~only_own_row]
    for budget in budgets:
        key = columns.accuracy_at(budget).key
        of_budget = shown[shown["asked"] == budget].set_index("line")
        missed = (of_budget["macs_ratio"] / budget - 1).abs() > columns.TOLERANCE
        table[key] = of_budget["accuracy"]
        table[f"{key}_spent"] = of_budget["macs_ratio"].where(missed)
    return table


def _heights(main: Setting, rows: pd.DataFrame, budgets: Sequence[float]) -> tuple[dict[str, Contender], pd.DataFrame]:
    """Return mean accuracies, by which curves are ranked, and kept accuracy and MACs at -2 points.

    A curve is linear between its points and dense, see `curves.area`. Only curves with a point at the lowest budget
    have these values, so that all of them span the same budgets. A height also needs that this point spends less than
    the next budget: otherwise nothing was measured near the lowest one.

    Args:
        main: the setting of the rows.
        rows: the points of all curves at the budgets, and of dense.
        budgets: the budgets over which curves are compared.
    """
    dense = main.contenders[rows.index[rows["line"] == DENSE][0]][0]
    lowest, following = sorted([*budgets, 1.0, 1.0])[:2]  # dense is the next one if there is only one budget
    lowest_spent = rows[rows["asked"] == lowest].groupby("line")["macs_ratio"].min()
    heights = {}
    by_name = {DENSE: {"kept_accuracy": 1.0, "macs_at_2": 1.0}}
    for name, points in points_of(rows).items():
        if name not in lowest_spent:
            continue
        spent = points["macs_ratio"].tolist()
        contenders = [main.contenders[entry][0] for entry in points.index]
        contenders.append(dense)
        height = curves.area(contenders, spent, lowest)
        if height is None:  # the points have no seed in common
            continue
        if lowest_spent[name] < following:
            heights[name] = height
        row = interval_row("macs_at_2", curves.least_macs(contenders, spent, main.lone))
        if row["macs_at_2"] == spent[0]:  # the curve never falls below, so the value is an upper bound
            row["macs_at_2_at_most"] = True
        by_name[name] = row
    kept = curves.kept_accuracy(list(heights.values()), dense, main.lone)
    for name, interval in zip(heights, kept, strict=True):
        by_name[name] |= interval_row("kept_accuracy", interval)
    return heights, pd.DataFrame.from_dict(by_name, orient="index")
