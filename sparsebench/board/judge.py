"""From records to a leaderboard: ranked rows for each strategy and budget, and for each strategy over its budgets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from sparsebench.board import columns, gaps, patches, probes
from sparsebench.board.columns import ALL_COLUMNS, Column, interval_row
from sparsebench.board.common import PRETRAINING, Common
from sparsebench.board.comparison import Comparison, beside_chosen, comparisons_of
from sparsebench.board.over_budgets import Curves, with_curves
from sparsebench.board.ranks import add_ranks, in_order, remove_ranks
from sparsebench.board.reading import (
    DENSE,
    MAIN,
    SEED,
    TARGET,
    TRACK,
    VARIANT,
    Flats,
    entry_of_dense,
    frame_of,
    metrics_of,
    over_seeds,
)
from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind
from sparsebench.measure.schedule import blocks_text
from sparsebench.records.record import ScheduleChoice
from sparsebench.records.reports import CHECKS, SEVERAL, UNCHECKED
from sparsebench.stats import paired
from sparsebench.stats.intervals import Successes, n50_ratio, sample_complexity
from sparsebench.stats.paired import Pairs, marks
from sparsebench.tasks.sources.labels import numbering

RANDOM_OF_SITE = {"input": "random"}
RANDOM_INSIDE = "random_inside"
RANDOM_TOKENS = (*RANDOM_OF_SITE.values(), RANDOM_INSIDE)
"""The baselines that rows are compared with at their own budget, besides dense: by the site of a strategy, and of
strategies of all other sites."""
TRIALS, GAP = "sample complexity", "spurious gap"
"""The parts of a board's columns that trials and gaps have."""
OVER_SIZES = (TRIALS, probes.PART)
"""The parts of a board's columns that are computed from all numbers of training samples."""
REPETITIONS = "complete repetitions"
"""The column of `_trials` with their number. It is not a column of boards."""
AMOUNT = ["budget_amount", "budget_value", "budget_rounding", "budget_where"]
"""Columns that say what a budget is, apart from blocks and schedule."""
NOTHING = {CHECKS: UNCHECKED, VARIANT: "", "badge": "", "track": TRACK, "class_folders": ""}
"""Values that are as uninformative as missing ones: an optional column is left out if it has no others."""


class Ranking(NamedTuple):
    """The ranked rows of one comparison.

    Attributes:
        parts: the comparison that each part of the columns is taken from, see `Column.part`. Part "accuracy" also
            covers cost and ranks.
        rows: the ranked rows.
        pairs: pairwise comparisons of the ranked rows.
        every: all rows in order, oracles last. Besides the board's columns they have `macs`; `asked`, the requested
            share of dense MACs; and `curve`, the name of the curve that has the row as a point, if any.
        curves: the strategies over their budgets, if they have several.
    """

    parts: Mapping[str, Comparison]
    rows: pd.DataFrame
    pairs: Pairs
    every: pd.DataFrame
    curves: Curves | None

    @property
    def comparison(self) -> Comparison:
        """The comparison of the ranking."""
        return self.parts["accuracy"]

    @property
    def task(self) -> str:
        """The name of the comparison's task."""
        return self.comparison.task


class Leaderboard(NamedTuple):
    """The rows of a leaderboard, ranked rows first and oracles last, with their rankings.

    Attributes:
        rankings: one ranking, of the main task; or one for each task and model if `by_task`.
        columns: columns of the rows. In a board over all tasks they name the task that they were taken from.
        by_task: whether tasks and models have separate rows.
        comparisons: all comparisons of the records, also those that are not on the board.
        sections: rankings of the main task on the same networks with other parameters, such as another share of
            relevant tokens. A board over all tasks has them below its tables.
    """

    rankings: Sequence[Ranking] = ()
    columns: Sequence[Column] = ALL_COLUMNS
    by_task: bool = False
    comparisons: Sequence[Comparison] = ()
    sections: Sequence[Ranking] = ()

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all rankings."""
        tables = [ranking.every for ranking in self.rankings]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns.keys_of(self.columns))

    @property
    def parts(self) -> Mapping[str, Comparison]:
        """The comparison of each part of the columns; empty for a board by task."""
        return {} if self.by_task or not self.rankings else self.rankings[0].parts

    @property
    def over_budgets(self) -> Ranking | None:
        """The first ranking with several budgets."""
        return next((ranking for ranking in self.rankings if ranking.curves is not None), None)


@threadpool_limits.wrap(limits=1, user_api="blas")  # the matrices are small: several threads are slower
def judge(records: Flats, by: str | None = None, judged: Leaderboard | None = None) -> Leaderboard:
    """Return the leaderboard of records.

    A board over all tasks uses one comparison of each task: the one with the most strategies, and of these the one with
    the most records. It is not the latest one, as the same cells must give the same board. The comparisons are ordered:
    main tasks of suites first, then tasks without trials, then by falling number of records. Each part of the columns
    is taken from the first comparison that has it, and its columns name that task.

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
    comparisons = comparisons_of(frame) if judged is None else judged.comparisons
    computed = () if judged is None else (*judged.rankings, *judged.sections)
    target = float(frame.attrs.get(TARGET, 0.0))
    failed_records = frame[~frame["status"].isin(("ok", "unsupported"))]
    with_failures = set(failed_records[["strategy", "budget"]].itertuples(index=False, name=None))

    if by == "task":
        groups = [[comparison] for comparison in comparisons]
    else:
        chosen = _one_of_each_task(comparisons, frame.attrs.get(MAIN, ()))
        groups = [chosen] if chosen else []

    def ranking_of(group: Sequence[Comparison]) -> Ranking:
        parts = _parts(group, kinds)
        # Comparisons are equal only if they are the same object, so equal parts have the same records.
        equal = next((ranking for ranking in computed if ranking.parts == parts), None)
        return equal or _rank(parts, kinds, with_failures, target)

    rankings = [ranking_of(group) for group in groups]
    board = Leaderboard(rankings, ALL_COLUMNS, by is not None, comparisons)
    if by is None and rankings:
        sections = _with_other_parameters(rankings[0].comparison, comparisons)
        board = board._replace(sections=[ranking_of([comparison]) for comparison in sections])
    visible = _visible(board, kinds)
    return board._replace(columns=[*columns.BY_TASK, *visible] if by else visible)


def _one_of_each_task(comparisons: Sequence[Comparison], mains: Sequence[str]) -> list[Comparison]:
    """Return the comparisons of a board over all tasks, in order, see `judge`.

    Args:
        comparisons: all comparisons.
        mains: the main tasks of suites.
    """

    def size(comparison: Comparison) -> tuple[int, int, int, str, str]:
        n_strategies = comparison.entries["strategy"].nunique()
        return n_strategies, len(comparison.measured), comparison.n_train, comparison.setting, comparison.track

    def place(comparison: Comparison) -> tuple[int, bool, int, str]:
        place_of_main = mains.index(comparison.source) if comparison.source in mains else len(mains)
        return place_of_main, comparison.has_trials, -len(comparison.measured), comparison.source

    of_task: dict[str, Comparison] = {}
    for comparison in sorted(comparisons, key=size):
        of_task[comparison.source] = comparison  # the last one is the largest
    # The pretraining task trains networks for other tasks: it is on the board only if there is no other.
    if len(of_task) > 1:
        of_task.pop(PRETRAINING, None)
    return sorted(of_task.values(), key=place)


def _with_other_parameters(main: Comparison, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the other comparisons of a task on the same trained networks, if it tests networks as they are."""
    if main.track != "frozen":
        return []
    others: dict[str, Comparison] = {}
    for comparison in comparisons:
        is_same = (comparison.source, comparison.model, comparison.track) == (main.source, main.model, main.track)
        if is_same and comparison.setting != main.setting and comparison.networks == main.networks:
            others[comparison.setting] = comparison  # the last one has the most images for fitting
    return list(others.values())


def _parts(group: Sequence[Comparison], kinds: Sequence[MetricKind]) -> dict[str, Comparison]:
    """Return the comparison of each part of the columns: the first of the group that has it."""
    parts = {"accuracy": group[0]}
    for comparison in reversed(group):  # the first of the group is last, so it replaces the others
        if comparison.has_trials:
            parts[TRIALS] = comparison
        if comparison.labels_patches:
            parts[patches.PART] = comparison
        elif comparison.is_probe:
            parts[probes.PART] = comparison
        if comparison.has("spurious_gap"):
            parts[GAP] = comparison
        for kind in kinds:
            if comparison.has(kind.name):
                parts[kind.name] = comparison
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
    for column in (*ALL_COLUMNS, *map(columns.column_of, kinds)):
        if column in columns.BY_TASK:
            continue
        if column.key in filled:
            task = board.parts[column.part].task if column.part in board.parts else ""
            visible.append(column._replace(task=task))
        elif column in columns.ALWAYS_SHOWN:
            visible.append(column._replace(task=""))
    return visible


def _rows(parts: Mapping[str, Comparison], kinds: Sequence[MetricKind], target: float) -> pd.DataFrame:
    """Return a row for each strategy and budget; each part of the columns is computed from its own comparison.

    Args:
        parts: the comparison of each part.
        kinds: the metrics with a column of their mean or median.
        target: the fixed target of probes; 0 for none.
    """
    main = parts["accuracy"]
    # Trials and probes use all numbers of training samples, everything else only the largest.
    used = [part.records if name in OVER_SIZES else part.tested for name, part in parts.items()]
    about = _about_strategies(used)

    tables = _measurements(parts, kinds, target)
    seed_counts = [records.groupby("entry")[SEED].nunique() for records in used]
    for table in tables:
        # The number of complete repetitions counts as another number of seeds, and is no column of its own.
        if REPETITIONS in table:
            seed_counts.append(table.pop(REPETITIONS))

    rows = main.every.loc[about.index].join([*tables, about, _schedules_of(parts)])
    # A row has as many seeds as the part with the fewest.
    rows["n_seeds"] = pd.concat(seed_counts, axis=1).min(axis=1).astype(int)
    rows["track"] = main.track
    rows["class_folders"] = numbering(main.params[0])
    rows["task"] = main.task
    rows["model"] = main.model
    rows["n_train"] = main.largest
    remove_ranks(rows)
    order = dict.fromkeys([*columns.keys_of(ALL_COLUMNS), *rows])
    return rows.reindex(columns=list(order))


def _measurements(parts: Mapping[str, Comparison], kinds: Sequence[MetricKind], target: float) -> list[pd.DataFrame]:
    """Return the tables of measured columns, by entry, see `_rows`."""
    tested = parts["accuracy"].tested
    means = dict.fromkeys(("accuracy", "macs", "macs_ratio", "selection_auroc"), "mean")
    tables = [over_seeds(tested, {**means, "images_per_s": "median"}), _devices(tested)]
    if TRIALS in parts:
        tables.append(_trials(parts[TRIALS]))
    if probes.PART in parts:
        tables.append(probes.columns_of(parts[probes.PART], target))
    if patches.PART in parts:
        tables.append(patches.columns_of(parts[patches.PART]))
    if GAP in parts:
        tables.append(gaps.columns_of(parts[GAP]))
    for kind in kinds:
        if kind.name in parts:
            tables.append(over_seeds(parts[kind.name].tested, {kind.name: kind.over_seeds}))
    return tables


def _schedules_of(parts: Mapping[str, Comparison]) -> pd.DataFrame:
    """Return the chosen schedules of the main task, and of the budgets that only the task with gaps has."""
    schedules = _schedules(parts["accuracy"].tested)
    if GAP in parts:
        schedules = schedules.combine_first(_schedules(parts[GAP].tested))
    return schedules


def _schedules(tested: pd.DataFrame) -> pd.DataFrame:
    """Return the chosen schedule of each entry with schedule=auto: its counts, or its name on each of several seeds."""
    schedules_of = tested[["entry", "schedule"]].astype({"schedule": object}).dropna()
    chosen = schedules_of[schedules_of["schedule"] != ""]
    texts = {}
    for entry, choices in chosen.groupby("entry")["schedule"]:
        schedules = [ScheduleChoice.model_validate_json(choice).best for choice in choices]
        different = {(schedule.blocks, schedule.counts) for schedule in schedules}
        if len(different) == 1:
            ((blocks, counts),) = different
            texts[entry] = f"{', '.join(map(str, counts))} after {blocks_text(blocks)}"
        else:
            names = Counter(schedule.name for schedule in schedules).most_common()
            texts[entry] = ", ".join(f"{name} ({n})" for name, n in names)
    return pd.DataFrame({"schedule": pd.Series(texts, dtype=object)})


def _devices(tested: pd.DataFrame) -> pd.DataFrame:
    """Return the names of the devices on which the records of each entry were timed."""
    timed = tested[tested["images_per_s"].notna()]
    names = {entry: ", ".join(sorted(set(devices))) for entry, devices in timed.groupby("entry")["device"]}
    return pd.DataFrame({"device": pd.Series(names, dtype=object)})


def _about_strategies(records: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return what is known of the strategy of each entry: training, site, variant, checks, badge.

    Several versions of a strategy can have records. If a value differs between them, the entry has none; if one of
    them is a variant, the entry is one.

    Args:
        records: the records of all parts of the columns.
    """
    if_several = {"trained": "", "site": "", VARIANT: "yes", CHECKS: SEVERAL, "badge": ""}
    every = pd.concat([part[["entry", *if_several]] for part in records])
    table = pd.DataFrame(index=np.unique(every["entry"]))
    for name, otherwise in if_several.items():
        values = every[name].astype(str).groupby(every["entry"])
        table[name] = values.first().where(values.nunique() == 1, otherwise)
    return table


def _trials(comparison: Comparison) -> pd.DataFrame:
    """Return the columns of sample complexity for each entry, with the number of complete repetitions."""
    records = comparison.records[["entry", "repetition", "n_train", "success", "success_loss"]]
    groups = {entry: part for entry, part in records.groupby("entry") if part["success"].notna().any()}
    trials = {entry: _successes(part, "success") for entry, part in groups.items()}
    dense = trials.get(entry_of_dense(comparison.records))
    rows = {}
    for entry, successes in trials.items():
        row = {REPETITIONS: len(successes.seeds)}
        row |= interval_row("sample_complexity", sample_complexity(successes))
        if groups[entry]["success_loss"].notna().any():
            by_loss = _successes(groups[entry], "success_loss")
            row |= interval_row("sample_complexity_loss", sample_complexity(by_loss))
        if dense is not None and math.isfinite(dense.n50):
            row |= interval_row("sample_complexity_ratio", n50_ratio(successes, dense))
        rows[entry] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def _successes(records: pd.DataFrame, metric: str) -> Successes:
    return Successes.of(*(records[name].to_numpy() for name in ("repetition", "n_train", metric)))


def _rank(
    parts: Mapping[str, Comparison],
    kinds: Sequence[MetricKind],
    with_failures: Collection[tuple[str, str]],
    target: float,
) -> Ranking:
    """Return the rows in order, with ranks, differences to baselines, Pareto fronts and values over budgets."""
    rows = _rows(parts, kinds, target)
    main = parts["accuracy"]
    unranked = _unranked(rows, main.common, with_failures)
    measured = rows[rows["accuracy"].notna()]
    all_pairs = _pairs_of(main, measured.index)

    rows.loc[measured.index, ["accuracy_low", "accuracy_high"]] = np.clip(all_pairs.accuracy, 0, 1)
    _add_differences(rows, measured, all_pairs, unranked)
    if probes.PART in parts:
        rows = _with_ranks_of_probes(rows, parts[probes.PART], measured, unranked)
    if patches.PART in parts:
        rows = patches.add_random(rows, parts[patches.PART], _entries_of_random(measured))

    # Oracles have marks but no rank.
    may_have_rank = ~measured.index.isin(unranked) & (measured["kind"] != "oracle").to_numpy()
    ranked_places = np.flatnonzero(may_have_rank)
    ranked = measured.index[ranked_places]
    pairs = all_pairs.among(ranked_places.tolist())
    add_ranks(rows, ranked, pairs)
    _add_fronts(rows, main, ranked, pairs)

    rows = in_order(
        rows,
        {
            "oracle": rows["kind"] == "oracle",
            "not ranked": rows["rank_low"].isna(),
            "accuracy": -rows["accuracy"],
        },
    )
    rows, over_budgets = with_curves(main, rows, unranked)
    return Ranking(parts, rows.loc[ranked], pairs, rows, over_budgets)


def _add_differences(rows: pd.DataFrame, measured: pd.DataFrame, pairs: Pairs, unranked: pd.Index) -> None:
    """Add to `rows` the differences of the measured ones to dense and to random tokens, see `_compare`."""
    may_have_mark = ~measured.index.isin(unranked)
    by_reference = (
        (DENSE, "accuracy_delta", _places_of_dense(measured)),
        ("random", "random_delta", _places_of_random(measured)),
    )
    for name, delta, references in by_reference:
        _compare(rows, measured.index, pairs, may_have_mark, name=name, delta=delta, references=references)


def _with_ranks_of_probes(
    rows: pd.DataFrame, comparison: Comparison, measured: pd.DataFrame, unranked: pd.Index
) -> pd.DataFrame:
    """Return rows with the differences of probes to random tokens, and with their ranks by images to target."""
    rows = probes.add_random(rows, comparison, _entries_of_random(measured))
    return probes.add_ranks(rows, unranked)


def _entries_of_random(measured: pd.DataFrame) -> dict[int, int]:
    """Return the entry of random tokens at the same site and budget, by entry."""
    entries = measured.index
    return {entries[row]: entries[random] for row, random in _places_of_random(measured).items()}


def _pairs_of(main: Comparison, measured: pd.Index) -> Pairs:
    """Return the comparisons of the measured entries."""
    results = [main.results[entry] for entry in measured]
    # Strategies that lack cells do not contribute to the pooled variance.
    outsiders = np.flatnonzero(measured.isin(main.common.incomplete)).tolist()
    return paired.compare(results, outsiders)


def _unranked(rows: pd.DataFrame, common: Common, with_failures: Collection[tuple[str, str]]) -> pd.Index:
    """Return the entries that are not ranked.

    A strategy with missing or failed cells is not ranked, as its remaining cells are a biased sample. A schedule
    beside a chosen one is not ranked. If strategies are compared over budgets, a
    strategy is ranked at all of its budgets or at none. Without dense, none is ranked.

    Args:
        rows: a row for each strategy and budget.
        common: what the strategies have in common.
        with_failures: strategies and budgets of which a cell failed.
    """
    if common.lacks_dense:
        return rows.index
    pairs = rows[["strategy", "budget"]].itertuples(index=False, name=None)
    has_failed = np.array([pair in with_failures for pair in pairs], dtype=bool)
    if common.budgets.common:
        strategies = {strategy for strategy, _ in with_failures}
        has_failed |= rows["strategy"].isin(strategies).to_numpy()
    # A board with chosen schedules compares what strategies choose, each at its best schedule. Other schedules, such as
    # the published one of a method that has one, are shown beside it.
    measured = rows[rows["accuracy"].notna()]
    has_other_schedule = rows.index.isin(measured.index[beside_chosen(measured)])
    return rows.index[has_failed | rows.index.isin(common.incomplete) | has_other_schedule]


def _add_fronts(rows: pd.DataFrame, main: Comparison, ranked: pd.Index, pairs: Pairs) -> None:
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


def _places_of_dense(rows: pd.DataFrame) -> dict[int, int]:
    """Return for the position of each row the position of dense, if any."""
    places = np.flatnonzero(rows["strategy"] == DENSE).tolist()
    return dict.fromkeys(range(len(rows)), places[0]) if places else {}


def _places_of_random(rows: pd.DataFrame) -> dict[int, int]:
    """Return for the position of each row the position of random tokens at the same site and budget, if any.

    A row of random tokens with the same blocks is preferred to one with other blocks and the same amount.
    """
    strategies = rows["strategy"].tolist()
    budgets = rows["budget"].tolist()
    amounts = list(rows[AMOUNT].itertuples(index=False, name=None))
    with_budget: dict[tuple[str, str], int] = {}
    with_amount: dict[tuple[str, tuple[str, ...]], int] = {}
    for place in np.flatnonzero(rows["strategy"].isin(RANDOM_TOKENS)).tolist():
        with_budget.setdefault((strategies[place], budgets[place]), place)
        with_amount.setdefault((strategies[place], amounts[place]), place)
    places = {}
    for place, site in enumerate(rows["site"]):
        random = random_tokens_of(site)
        same_amount = with_amount.get((random, amounts[place]))
        counterpart = with_budget.get((random, budgets[place]), same_amount)
        if counterpart is not None:
            places[place] = counterpart
    return places


def random_tokens_of(site: str) -> str:
    """Return the baseline that removes random tokens where strategies of a site remove theirs."""
    return RANDOM_OF_SITE.get(site, RANDOM_INSIDE)


def _compare(
    rows: pd.DataFrame,
    measured: pd.Index,
    pairs: Pairs,
    may_have_mark: np.ndarray,
    *,
    name: str,
    delta: str,
    references: Mapping[int, int],
) -> None:
    """Add differences to reference rows, with intervals and marks that are corrected for all of these comparisons.

    A row has a difference if its reference has all of its seeds: the difference is then that of the accuracies. A row
    is marked only if both it and its reference may have a mark.

    Args:
        rows: the rows.
        measured: the entries of the R rows that `pairs` compares.
        pairs: their comparisons.
        may_have_mark: (R,) whether a row may have a mark.
        name: the strategy of the references, in the column of marks.
        delta: the column of differences.
        references: the place of the reference, by the place of the row.
    """
    seeds_of_rows = np.diag(pairs.n_seeds)  # a row has all of its seeds in common with itself
    with_all_seeds = {}
    for row, other in references.items():
        if pairs.n_seeds[row, other] == seeds_of_rows[row]:
            with_all_seeds[row] = other
    places = list(with_all_seeds)
    others = list(with_all_seeds.values())
    mean = pairs.mean[places, others]
    half = pairs.half[places, others]
    ends = np.clip(np.stack([mean, mean - half, mean + half], axis=1), -1, 1) + 0.0  # no minus zero
    rows.loc[measured[places], [delta, f"{delta}_low", f"{delta}_high"]] = ends

    marked = {}
    for row, other in with_all_seeds.items():
        if row != other and may_have_mark[row] and may_have_mark[other]:
            marked[row] = other
    of_entries = {measured[row]: mark for row, mark in marks(pairs, marked).items()}
    rows[f"versus_{name}"] = pd.Series(of_entries, dtype=object)
