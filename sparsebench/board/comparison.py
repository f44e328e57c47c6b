"""Comparisons: the records of a task, a model and a track, in which strategies and budgets are compared."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board.common import CELL, Common, common_of
from sparsebench.board.reading import DENSE, ENTRY, KEY, SEED, WEIGHTS, dense_of, entry_of_dense, over_seeds
from sparsebench.errors import few, plain
from sparsebench.records.record import canonical, numbers_of
from sparsebench.records.table import FOREGROUNDS, GROUPS, IDENTITY, ITEMS, LABELS, NEIGHBOURS, PREDICTIONS, WHERE
from sparsebench.stats.curves import Groups
from sparsebench.stats.paired import Results
from sparsebench.strategy.budget import AUTO
from sparsebench.strategy.spec import label
from sparsebench.tasks.sources.labels import numbering

Numbers = Callable[[Any, int], np.ndarray]
"""`numbers_of`, with a cache: strategies then share the arrays of a test."""
MOST_NETWORKS_NAMED = 5
"""Largest number of networks that `about` names."""
TRACKS = {
    "frozen": "trained without a strategy; strategies act in the test only",
    "probe": "frozen; probes are learned from the features of training images, with the strategy in all passes",
    "tuned": "trained further with the strategy",
    "scratch": "trained with the strategy",
}
"""Descriptions of the networks of each track."""
HEADS = {
    "dense": "frozen; one linear head for all strategies is learned on patches of training images without a strategy",
    "own": "frozen; a linear head is learned on the patches of training images with each strategy",
}
"""The same for predicted patches, by the parameter `head` of the task."""
SOURCES = {
    "photos": "photographs",
    "pictures": "photographs of a folder",
    "folder": "pictures of a folder",
    "masked": "pictures with masks of a folder",
}
"""Names of sources of pictures that tables show differently. The source of a user's folder ends with a hash."""


@dataclass(eq=False)
class Comparison:
    """The records of one task, model and track with equal parameters.

    They also have one number of training samples, unless the task has a success criterion, or the track is probe.

    Attributes:
        source: the name of the task.
        task, model: names of task and model, with the parameters that differ between comparisons of the same names. If
            tracks differ, the task's name includes the track.
        setting: the parameters of task and model, as `row_of` writes them.
        n_train: number of training samples; 0 if the task has a success criterion and on the track probe, as all sizes
            are then together, or if it trains nothing.
        track: see `cell.Track`; strategies of different tracks are never ranked together.
        measured: the records with status ok.
        others: the other records.
        every: a row for each entry of all comparisons: strategy, kind and budget, with the columns IDENTITY; `asked`,
            the requested share of dense MACs; `form`, the label of the budget without this share; and `curve_key`, the
            strategy, kind and form that identify the curve over budgets that has the entry as a point. It is None for
            dense, for a budget that is not a share of dense MACs below 1, and for `_beside_chosen_schedules`.
        board: the title of its board where several boards are shown as one; otherwise "".
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
    board: str = ""

    @cached_property
    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of task and model; empty if `setting` cannot be parsed."""
        try:
            task, model = (part["params"] for part in json.loads(self.setting)[:2])
        except (ValueError, TypeError):
            return {}, {}
        return task, model

    @cached_property
    def trainings(self) -> list[dict[str, Any]]:
        """The tasks that trained the networks, see `table.setting_text`; [] on the track scratch or if unknown."""
        try:
            return [part[0] for part in json.loads(self.setting)[2:] if isinstance(part, list)]
        except (ValueError, TypeError, LookupError):
            return []

    @property
    def learned_classes(self) -> bool:
        """Whether probes are learned on networks of a suite, which the same classes have trained."""
        return self.is_probe and bool(self.trainings)

    @cached_property
    def entries(self) -> pd.DataFrame:
        """The rows of `every` that have records in this comparison."""
        return self.every.loc[np.unique(self.measured[ENTRY])]

    @cached_property
    def records(self) -> pd.DataFrame:
        """The records that the board uses: those of common cells, or all of an entry that has none of these cells."""
        used = self.common.used
        rows = used.index.get_indexer(self.measured[ENTRY])
        columns = used.columns.get_indexer(pd.MultiIndex.from_frame(self.measured[CELL]))
        return _where(self.measured, used.to_numpy()[rows, columns])

    @cached_property
    def largest(self) -> int:
        """The largest number of training samples."""
        sizes = self.common.cells.get_level_values("n_train")
        return int(max(sizes, default=self.measured["n_train"].max()))

    @cached_property
    def tested(self) -> pd.DataFrame:
        """The records at the largest number of training samples."""
        return _where(self.records, (self.records["n_train"] == self.largest).to_numpy())

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds at the largest number of training samples on which strategies are compared."""
        cells = self.common.cells
        return sorted(set(cells[cells.get_level_values("n_train") == self.largest].get_level_values(SEED)))

    @property
    def title(self) -> str:
        """The title: board, task, model and track, and the number of training samples unless the track is frozen."""
        most = f"{'up to ' if self.has_trials or self.is_probe else ''}{self.largest}"
        samples = f"{most} training samples" if self.largest and self.track != "frozen" else ""
        text = ", ".join(filter(None, (self.task, self.model, samples, self.track)))
        return f"{self.board}: {text}" if self.board else text

    @cached_property
    def networks(self) -> dict[int, str]:
        """The common networks that are tested as they are, by seed, see `Cell.network`; all if none is common.

        Empty if repetitions are trained.
        """
        return self._networks_by("network")

    @cached_property
    def weights(self) -> dict[int, str]:
        """The same networks by the hashes of their weights, see `reading.WEIGHTS`."""
        return self._networks_by(WEIGHTS)

    def _networks_by(self, column: str) -> dict[int, str]:
        """Return what a column has of the common networks, by seed; of all if none is common."""
        of_seeds = self.measured.loc[self.measured["network"] != "", [SEED, column]].drop_duplicates(SEED)
        networks = of_seeds.set_index(SEED)[column].to_dict()
        common_networks = {seed: networks[seed] for seed in self.seeds if seed in networks}
        return common_networks if common_networks else networks

    @cached_property
    def lone(self) -> bool:
        """Whether strategies are compared on one network or seed: intervals and tests are then over its test items."""
        return len(self.seeds) == 1

    @cached_property
    def has_trials(self) -> bool:
        """Whether the task has a success criterion."""
        return bool(self.measured["success"].notna().any())

    @cached_property
    def relevant(self) -> float:
        """The share of relevant tokens among all tokens of its pictures, as dense keeps all; NaN if unknown."""
        dense = entry_of_dense(self.tested)
        shares = over_seeds(self.tested, {"selection_precision": "mean"})["selection_precision"]
        return math.nan if dense is None else float(shares[dense])

    def has(self, metric: str) -> bool:
        """Return whether a metric was measured at the largest number of training samples."""
        return bool(self.tested[metric].notna().any())

    @cached_property
    def common(self) -> Common:
        """What the strategies are compared on."""
        return common_of(self)

    @cached_property
    def results(self) -> dict[int, Results]:
        """The results of each entry for paired comparisons.

        Seeds have their accuracy, and test items whether they are correct, or the share of draws in which they are. If
        repetitions test a network on different pictures, their items are concatenated.
        """
        return {entry: results for entry, (results, _) in self._results_and_groups.items()}

    @cached_property
    def groups(self) -> dict[int, Groups]:
        """For each entry and seed the (I,) group of each test item, if known."""
        return {entry: groups for entry, (_, groups) in self._results_and_groups.items()}

    @cached_property
    def _results_and_groups(self) -> dict[int, tuple[Results, Groups]]:
        return _results_of(self.tested, "accuracy")

    @property
    def is_probe(self) -> bool:
        """Whether probes are compared."""
        return self.track == "probe"

    @cached_property
    def labels_patches(self) -> bool:
        """Whether probes that predict patches are compared. The test items are then patches."""
        # Without an object in the test there is no intersection over union, but the accuracy on the background.
        return self.is_probe and (self.has("iou") or self.has("accuracy_irrelevant"))

    @cached_property
    def n_classes(self) -> int:
        """The number of classes of the test items."""
        labels = self.tested.loc[self.tested[ITEMS] > 0, [LABELS, ITEMS]].drop_duplicates()
        return len({int(label) for row in labels.itertuples(index=False) for label in numbers_of(*row)})

    def results_at(self, n_train: int) -> dict[int, Results]:
        """Return the results of each entry with this number of training images."""
        records = self.records[self.records["n_train"] == n_train]
        return {entry: results for entry, (results, _) in _results_of(records, "accuracy").items()}

    def neighbours_at(self, n_train: int) -> dict[int, Results]:
        """Return the results of the nearest neighbours of each entry with this number of training images."""
        records = self.records[self.records["n_train"] == n_train]
        # In this order: a column assigned to a table without rows would bring rows back.
        records = records.assign(**{PREDICTIONS: records[NEIGHBOURS]})
        records = records[records["neighbour_accuracy"].notna()]
        return {entry: results for entry, (results, _) in _results_of(records, "neighbour_accuracy").items()}


def _where(records: pd.DataFrame, mask: np.ndarray) -> pd.DataFrame:
    """Return some of the records; the table itself, without a copy, if these are all."""
    return records if mask.all() else records[mask]


def _results_of(records: pd.DataFrame, accuracy: str) -> dict[int, tuple[Results, Groups]]:
    """Return the results of each entry of some records with one number of training samples, and its items' groups.

    Args:
        records: the records.
        accuracy: the column of the accuracies of the predictions.
    """
    means = records.groupby([ENTRY, SEED])[accuracy].mean().dropna()
    means_of = {entry: part.droplevel(ENTRY).to_dict() for entry, part in means.groupby(ENTRY)}
    numbers = cache(numbers_of)
    names = [ENTRY, SEED, ITEMS, LABELS, FOREGROUNDS, GROUPS, PREDICTIONS]
    # An entry without predictions has results too: the accuracies of its seeds.
    rows_of: dict[int, list[Any]] = {entry: [] for entry in set(records[ENTRY])}
    for row in records[names].itertuples(index=False):
        if row.test_predictions:
            rows_of[row.entry].append(row)
    return {entry: _results(means_of.get(entry, {}), rows, numbers) for entry, rows in rows_of.items()}


def _results(means: Mapping[int, float], rows: Sequence[Any], numbers: Numbers) -> tuple[Results, Groups]:
    """Return the results of an entry, and for each seed the group of each test item, if known.

    Args:
        means: the accuracy of each seed.
        rows: the records that have test items. Several draws of a test have the same labels and foregrounds.
        numbers: decodes the columns of test items.
    """
    tests_of_seed: dict[int, dict[tuple[Any, Any], list[Any]]] = {}
    for row in rows:
        draws_of_test = tests_of_seed.setdefault(row.seed, defaultdict(list))
        draws_of_test[row.test_labels, row.test_foregrounds].append(row)

    hits: dict[int, tuple[Hashable, np.ndarray]] = {}
    first_draws: dict[int, list[Any]] = {}
    for seed, draws_of_test in tests_of_seed.items():
        test_keys = sorted(draws_of_test)
        hits[seed] = tuple(test_keys), _join([_hits(draws_of_test[key], numbers) for key in test_keys])
        first_draws[seed] = [draws_of_test[key][0] for key in test_keys]

    # If the draws of one seed differ, its hits are shares. Then those of all seeds are.
    if any(item_hits.dtype != bool for _, item_hits in hits.values()):
        hits = {seed: (name, item_hits.astype(float)) for seed, (name, item_hits) in hits.items()}

    groups = _of_items(first_draws, GROUPS, numbers)
    foregrounds = _of_items(first_draws, FOREGROUNDS, numbers)
    all_known = len(foregrounds) == len(first_draws)
    clusters = foregrounds if all_known and _some_repeat(foregrounds) else None
    return Results(means, hits, clusters), groups


def _of_items(first_draws: Mapping[int, Sequence[Any]], column: str, numbers: Numbers) -> dict[int, np.ndarray]:
    """Return for each seed the (I,) numbers that a column has for its test items, for seeds whose tests all have them.

    Args:
        first_draws: for each seed, a record of each of its tests; all draws of a test have the same items.
        column: the column of the records.
        numbers: decodes the column.
    """
    of_seeds = {}
    for seed, draws in first_draws.items():
        if all(getattr(draw, column) for draw in draws):
            of_seeds[seed] = _join([numbers(getattr(draw, column), draw.test_items) for draw in draws])
    return of_seeds


def _some_repeat(foregrounds: Mapping[int, np.ndarray]) -> bool:
    """Return whether several items have the same foreground. Otherwise each item is its own cluster."""
    if not foregrounds:
        return False
    n_items = np.bincount(np.concatenate(list(foregrounds.values())))
    return bool(n_items.max() > 1)


def _hits(draws: Sequence[Any], numbers: Numbers) -> np.ndarray:
    """Return (I,) whether each item of a test is correct; if draws differ, the share of draws in which it is."""
    truth = numbers(draws[0].test_labels, draws[0].test_items)
    # Predictions are decoded without the cache: no other record has them.
    first, *others = (numbers_of(row.test_predictions, row.test_items) == truth for row in draws)
    if all((hits == first).all() for hits in others):
        return first
    return np.mean([first, *others], axis=0)


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the parts concatenated; a single part is not copied, as others may share it."""
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


# From records to comparisons


def comparisons_of(frame: pd.DataFrame) -> list[Comparison]:
    """Return the comparisons of the records with status ok, sorted by task, parameters, size and track.

    Args:
        frame: records, from `frame_of`.
    """
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for comparison in _with_equal_parameters(frame):
        groups[comparison.task, comparison.model].append(comparison)
    comparisons = [named for group in groups.values() for named in _with_distinct_names(group)]
    return sorted(comparisons, key=lambda one: (one.source, _with_padding(one.setting), one.n_train, one.track))


def _with_padding(text: str) -> str:
    """Return a text with zeros before its numbers, so that 56 is before 168. Digits after a point stay as they are."""
    return re.sub(r"(?<![\d.])\d+", lambda digits: digits[0].zfill(20), text)


def _with_equal_parameters(frame: pd.DataFrame) -> Iterator[Comparison]:
    """Yield the comparisons, with the plain names of their tasks and models."""
    entries = _entries(frame)
    is_ok = (frame["status"] == "ok").to_numpy(bool)
    measured_records = frame[is_ok]
    other_records = frame[~is_ok]
    measured_records.attrs = other_records.attrs = {}  # pandas would copy them with each part
    others_of = {where: part for where, part in other_records.groupby(["task", "setting", "track"], observed=True)}

    # A size is a number of training samples. It is 0 if the task has a success criterion, and for probes, so that all
    # are together. It is 0 as well in the records of tasks that train nothing, measured or not.
    has_sizes = measured_records["success"].isna() & (measured_records["track"] != "probe")
    size = measured_records["n_train"].where(has_sizes, 0).rename("size")
    # The model is no key, because the setting names it.
    groups = measured_records.groupby(["task", "setting", size, "track"], observed=True, sort=False)
    for (task, setting, n_train, track), measured in groups:
        others = others_of.get((task, setting, track), other_records[:0])
        if n_train:
            others = others[others["n_train"] == n_train]
        yield Comparison(
            source=task,
            task=task,
            model=str(measured["model"].iloc[0]),
            setting=setting,
            n_train=int(n_train),
            track=track,
            measured=measured,
            others=others,
            every=entries,
        )


def _with_distinct_names(comparisons: Sequence[Comparison]) -> Iterator[Comparison]:
    """Yield comparisons of a task and a model, with the parameters in which they differ in their names."""
    task_params = _varying([comparison.params[0] for comparison in comparisons])
    model_params = _varying([comparison.params[1] for comparison in comparisons])
    tracks = {comparison.track for comparison in comparisons}
    for comparison, of_task, of_model in zip(comparisons, task_params, model_params, strict=True):
        if len(tracks) > 1:
            of_task["track"] = comparison.track
        task = plain(label(comparison.task, of_task), 1000)
        model = plain(label(comparison.model, of_model), 1000)
        yield replace(comparison, task=task, model=model)


def _entries(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each entry of the records, see `Comparison.every`."""
    names = [*KEY, *IDENTITY]
    first = frame[[ENTRY, *names, "macs_ratio_asked"]].drop_duplicates(ENTRY).set_index(ENTRY).sort_index()
    entries = first[names].astype(object).assign(asked=first["macs_ratio_asked"])
    forms = []
    curve_keys = []
    for entry in entries.itertuples(index=False):
        form = _form(entry)
        # A budget that is not a share has NaN, which is not below 1. A budget of all MACs removes no token.
        is_point = entry.strategy != DENSE and entry.asked < 1
        forms.append(form)
        curve_keys.append((entry.strategy, entry.kind, form) if is_point else None)
    entries = entries.assign(
        form=pd.Series(forms, entries.index, dtype=object),
        curve_key=pd.Series(curve_keys, entries.index, dtype=object),
    )
    entries.loc[_beside_chosen_schedules(entries), "curve_key"] = None
    return entries


def _beside_chosen_schedules(entries: pd.DataFrame) -> list[int]:
    """Return the entries with a stated schedule that a strategy has at only some budgets of its chosen schedules.

    They show how much depends on the choice at these budgets, and would make a curve of another length.
    """
    points = entries.dropna(subset="curve_key")
    budgets = points.groupby("curve_key")["asked"].agg(set).to_dict()
    owner = ["strategy", "kind", "budget_where"]
    chosen = points[points["budget_places"] == AUTO].groupby(owner)["asked"].agg(set).to_dict()
    beside = []
    for entry in points[is_stated(points)].itertuples():
        of_chosen = chosen.get((entry.strategy, entry.kind, entry.budget_where), set())
        if budgets[entry.curve_key] < of_chosen:
            beside.append(entry.Index)
    return beside


def is_stated(rows: pd.DataFrame) -> pd.Series:
    """Return which rows state blocks or a kind of schedule: neither the default schedule nor schedule=auto."""
    return ~rows["budget_places"].isin(["", AUTO])


def beside_chosen(rows: pd.DataFrame) -> pd.Series:
    """Return which rows have another schedule at a budget at which the strategy also has a row with schedule=auto.

    Args:
        rows: measured rows, with the columns of `Comparison.every`.
    """
    owner = ["strategy", "kind", "budget_where", "asked"]
    chooses = rows["budget_places"] == AUTO
    chosen = set(rows.loc[chooses, owner].itertuples(index=False, name=None))
    has_chosen = [key in chosen for key in rows[owner].itertuples(index=False, name=None)]
    return pd.Series(has_chosen, rows.index, dtype=bool) & ~chooses


def _form(entry: Any) -> str:
    """Return the label of an entry's budget without the share of dense MACs: what all points of a curve share.

    A budget that is not a share of dense MACs has its whole label.
    """
    is_share = not math.isnan(entry.asked)
    if not is_share:
        return str(entry.budget)
    words = [word for word in (entry.budget_rounding, entry.budget_places) if word]
    form = " ".join(words) + WHERE[entry.budget_where]
    return form.removeprefix(", ")  # without words, the text of `WHERE` comes first


def _varying(params_of_all: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each set of parameters reduced to those that differ between the sets or are missing in some."""
    keys = {key for params in params_of_all for key in params}
    varied = {key for key in keys if len({canonical(params.get(key)) for params in params_of_all}) > 1}
    return [{key: value for key, value in params.items() if key in varied} for params in params_of_all]


# In words


def about(comparison: Comparison, *, with_share: bool = True) -> str:
    """Return one sentence on the data, and one on the networks and the track.

    Args:
        comparison: the comparison.
        with_share: whether to say the share of relevant tokens.
    """
    dense = dense_of(comparison.tested)
    track = TRACKS.get(comparison.track, comparison.track)
    if comparison.labels_patches:
        track = HEADS.get(str(comparison.params[0].get("head")), track)
    networks = _about_networks(comparison, dense)
    data = _about_data(comparison, dense, with_share)
    text = f"Data: {data}. {networks}, {track} (track {comparison.track})."
    if comparison.learned_classes:
        text += " The networks were trained on these classes, so this is no test of what their features represent."
    return plain(text, 1000)


def _about_data(comparison: Comparison, dense: pd.DataFrame, with_share: bool) -> str:
    """Return what the data are: pictures, size, classes, number of test items, share of relevant tokens."""
    task, model = comparison.params
    pictures = pictures_of(comparison)
    where = ", ".join(filter(None, (comparison.board, f"task {comparison.task}")))
    parts = [f"{pictures} ({where})" if pictures else where]
    pixels = task.get("canvas")
    patch = model.get("patch", task.get("patch"))
    if isinstance(pixels, int) and isinstance(patch, int) and patch > 0:  # the parameters may be those of any plugin
        parts.append(f"{pixels} x {pixels} pixels in {(pixels // patch) ** 2} patches")
    tests = dense.loc[dense[ITEMS] > 0, [LABELS, ITEMS]].drop_duplicates()
    if len(tests):
        classes: set[int] = set()
        for labels, n in tests.itertuples(index=False):
            classes.update(numbers_of(labels, n).tolist())
        parts.append(f"{len(classes)} classes")
        parts.append(f"{tests[ITEMS].iloc[0]:,} test {items_of(comparison)} for each network")
    relevant = about_relevant(comparison)
    if relevant and with_share:
        parts.append(relevant)
    rule = numbering(task)
    if rule:
        parts.append(f"class folders are numbered {rule}")
    return ", ".join(parts)


def about_relevant(comparison: Comparison) -> str:
    """Return the share of relevant tokens as words; "" if it is unknown."""
    share = comparison.relevant
    if math.isnan(share):
        return ""
    tokens = "patches" if items_of(comparison) != "samples" else "tokens"
    return f"{share:.0%} of the {tokens} relevant"


def _about_networks(comparison: Comparison, dense: pd.DataFrame) -> str:
    """Return how many networks of which model there are, with their size and names."""
    _, model = comparison.params
    parts = [f"{name} {model[name]}" for name in ("depth", "dim", "heads", "patch") if name in model]
    parts = [str(model[name]) for name in ("arch", "weights") if model.get(name)] + parts
    weights = dense["parameters"].mean()
    if weights > 0:
        parts.append(f"{weights / 1e6:.2g} M weights")
    if model.get("precision") == "bfloat16":
        parts.append("in bfloat16")
    if comparison.networks:
        parts.append(few(sorted(comparison.networks.values()), MOST_NETWORKS_NAMED))
    number = len(comparison.seeds)
    text = f"{number or 'No'} network{'' if number == 1 else 's'} of model {comparison.model}"
    if comparison.is_probe and not comparison.trainings:
        text = f"One network of model {comparison.model}, {number} repetition{'' if number == 1 else 's'}"
    return f"{text} ({', '.join(parts)})" if parts else text


def pictures_of(comparison: Comparison) -> str:
    """Return what the pictures of a task show; "" if the task does not name any."""
    names = (comparison.params[0].get(key) for key in ("images", "backgrounds"))
    return " on ".join(SOURCES.get(x.partition("-")[0], x) for x in names if isinstance(x, str) and x)


def items_of(comparison: Comparison) -> str:
    """Return what a test consists of: images, patches, or without pictures samples, such as sets of tokens."""
    if comparison.labels_patches:
        return "patches"
    has_images = pictures_of(comparison) or "canvas" in comparison.params[0] or "patch" in comparison.params[1]
    return "images" if has_images else "samples"
