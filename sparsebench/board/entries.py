"""Flat records by what they measured: settings of a task, and in each the strategies at their budgets."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board.columns import EVERY
from sparsebench.errors import few, plain
from sparsebench.measure.metrics import GROUP as OF_GROUPS
from sparsebench.measure.metrics import METRICS as KINDS
from sparsebench.measure.metrics import MetricKind
from sparsebench.records.cell import canonical
from sparsebench.records.record import numbers_of
from sparsebench.records.table import FOREGROUNDS, GROUPS, OUTCOMES, PREDICTIONS
from sparsebench.stats.intervals import Successes
from sparsebench.stats.paired import Contender
from sparsebench.strategy.spec import label
from sparsebench.tasks.sources.labels import described
from sparsebench.testing.reports import CHECKS, UNCHECKED

DENSE = "dense"
PRETRAINING = "plain"
SHOWN = tuple(kind for kind in KINDS if kind.over_seeds != "none" and not kind.name.endswith(OF_GROUPS))
"""The metrics of sparsebench that a board has a column of; of some of them it makes the column itself."""
METRICS = (
    *(kind.name for kind in SHOWN), "success", "success_loss", "fitted", "macs", "macs_ratio_planned", "accuracy_top5",
    "parameters", "timed_batch",
)  # fmt: skip
"""The metrics that the board reads, besides those of groups and those that tasks declare."""
ORDER = ("n_train", "repetition", "cell_id")
"""What records are sorted by: sums of floating-point numbers depend on their order, and the board must not."""
TRAINED, BADGE, HOW, READY = "trained", "badge", "how", "ready for the board"
NETWORK, SEED = "network", "seed"
"""The column of `Cell.network`; and of what paired comparisons go by: that network's number, else the repetition."""
DECLARED, MAIN, SUCCESS = "metrics of tasks", "main tasks", "metric of success"
"""Under which a table of records says what the metrics are that its tasks declare, and what its suites say: their main
tasks, and the metric by which sample complexity is counted, `success` unless they name another."""
ABOUT = (
    "cell_id", "status", "reason", "task", "model", "strategy", "kind", "budget", "setting", "device", "environment",
    "inactive", "cost_model",
)  # fmt: skip
ON_BACKGROUND = re.compile(r"accuracy: .+ on .+(?<!\.low)(?<!\.high)")
"""What records call accuracies of groups that are a class on a background each."""
TRACK = "scratch"
"""The track of records that say none."""
Key = tuple[str, str, str]
"""Strategy, kind and budget of an entry."""


def frame_of(records: pd.DataFrame | Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return flat records as a table with all columns that the board reads, in ORDER."""
    frame = records if isinstance(records, pd.DataFrame) else pd.DataFrame(list(records))
    if frame.attrs.get(READY):
        return frame
    lacking: dict[str, Any] = {
        name: ""
        for name in (*ABOUT, TRAINED, BADGE, HOW, NETWORK, *OUTCOMES[1:], GROUPS, FOREGROUNDS)
        if name not in frame
    }
    lacking |= {"track": TRACK} if "track" not in frame else {}
    lacking |= {name: 0 for name in ("n_train", "repetition", OUTCOMES[0]) if name not in frame}
    read = (*METRICS, "macs_ratio_asked", *(kind.name for kind in metrics_of(frame)))
    numbers = {name: frame[name].astype(float) if name in frame else np.nan for name in read}
    if (success := frame.attrs.get(SUCCESS, "success")) in frame:
        numbers["success"] = frame[success].astype(float)
    numbers |= {name: np.clip(numbers[name], 0, 1) for name in ("success", "success_loss")}
    frame = frame.assign(**({CHECKS: UNCHECKED} if CHECKS not in frame else {}), **lacking, **numbers)
    tested = frame[NETWORK].astype(str)
    number = {name: i for i, name in enumerate(sorted(set(tested) - {""}))}
    frame[SEED] = (
        frame["repetition"].where(tested == "", tested.map(number)).astype(int) if number else frame["repetition"]
    )
    if not _is_in_order(frame):
        frame = frame.sort_values(list(ORDER), kind="stable")
    frame.attrs[READY] = True
    return frame


def _is_in_order(frame: pd.DataFrame) -> bool:
    order = np.ones(max(0, len(frame) - 1), dtype=bool)
    for column in (frame[name].array for name in reversed(ORDER)):
        rises, same = (np.asarray(one, dtype=bool) for one in (column[1:] > column[:-1], column[1:] == column[:-1]))
        order = rises | (same & order)
    return bool(order.all())


def metrics_of(frame: pd.DataFrame) -> list[MetricKind]:
    """Return the metrics whose columns are their means or medians: those that tasks declare, and others of SHOWN."""
    own = {column.key for column in EVERY}
    declared = (kind for kind in frame.attrs.get(DECLARED, ()) if kind.over_seeds != "none")
    return [*(kind for kind in SHOWN if kind.name not in own), *declared]


class Columns:
    """The columns of all records, as arrays that are made once; predictions stay where they are until looked at.

    Labels, groups and foregrounds, which all strategies of a seed have the same, are unpacked once.
    """

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self._made: dict[str, Any] = {}
        self._numbers: dict[bytes, np.ndarray] = {}

    def take(self, name: str, places: np.ndarray) -> np.ndarray:
        """Return some values of a column."""
        if name not in self._made:
            column = self.frame[name]
            self._made[name] = column.array if name == PREDICTIONS else column.to_numpy()
        return np.asarray(self._made[name].take(places))

    def numbers(self, content: bytes, n: int) -> np.ndarray:
        """Return the (n,) numbers of a value of a column of outcomes."""
        if content not in self._numbers:
            self._numbers[content] = numbers_of(content, n)
        return self._numbers[content]


@dataclass(frozen=True)
class Entry:
    """The records of one strategy at one budget in one setting, in the order of size, seed and cell.

    Attributes:
        columns: of all records; `places` which of them are this entry's.
    """

    columns: Columns
    places: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """Return the values of a column, one a record."""
        return self.columns.take(name, self.places)

    @property
    def size(self) -> int:
        """How many records there are."""
        return len(self.places)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of training samples of each record."""
        return self.column("n_train")

    @cached_property
    def repetitions(self) -> np.ndarray:
        """The repetition of each record."""
        return self.column("repetition")

    @cached_property
    def seeds(self) -> np.ndarray:
        """The seed of each record, see `SEED`."""
        return self.column(SEED)

    @cached_property
    def draws(self) -> bool:
        """Whether its repetitions are draws on networks that are tested as they are."""
        return bool((self.column(NETWORK) != "").any())

    def at(self, n_train: int) -> Entry:
        """Return the part of it with that number of training samples."""
        return Entry(self.columns, self.places[self.sizes == n_train])

    def by_seed(self, metric: str) -> dict[int, float]:
        """Return a metric by seed, where it was measured; the mean over draws on one network."""
        values = self.column(metric).astype(float)
        known = ~np.isnan(values)
        seeds, values = self.seeds[known], values[known]
        if self.draws:
            seeds, place, n = np.unique(seeds, return_inverse=True, return_counts=True)
            values = np.bincount(place, values) / n
        return dict(zip(seeds.tolist(), values.tolist(), strict=True))

    def over_seeds(self, metric: str, how: str = "mean") -> float | None:
        """Return the mean, or median, of a metric over seeds, None where it was not measured."""
        values = list(self.by_seed(metric).values())
        return float(np.median(values) if how == "median" else np.mean(values)) if values else None

    @cached_property
    def trials(self) -> Successes | None:
        """The successes by repetition and number of training samples; None where the task has no criterion."""
        return self.successes("success")

    def successes(self, metric: str) -> Successes | None:
        """Return the successes as another metric has them, or None where none does."""
        values = self.column(metric)
        return None if np.isnan(values).all() else Successes.of(self.repetitions, self.sizes, values)

    @property
    def machines(self) -> frozenset[tuple[str, str]]:
        """The devices and machines that it ran on; speeds of other places do not compare."""
        return frozenset(zip(self.column("device").tolist(), self.column("environment").tolist(), strict=True))

    def words(self, name: str) -> set[str]:
        """Return the different values of a column of texts."""
        return set(self.column(name))

    @cached_property
    def contender(self) -> Contender:
        """What it is compared by: the accuracy of each seed, and which test items it got right, mean over draws."""
        outcomes = [self.column(name) for name in OUTCOMES]
        hits = {seed: (tuple(tests), self._hits(tests.values(), *outcomes)) for seed, tests in self.tests.items()}
        if any(each.dtype != bool for _, each in hits.values()):
            hits = {seed: (name, each.astype(float)) for seed, (name, each) in hits.items()}
        return Contender(self.by_seed("accuracy"), hits, self._clusters())

    @cached_property
    def tests(self) -> dict[int, dict[tuple[bytes, bytes], list[int]]]:
        """By seed its tests, each named by what it asks, with the places of those of its records that hold outcomes.

        It is one test but for a network that is tested as it is on other pictures in each repetition.
        """
        tests: dict[int, dict[tuple[bytes, bytes], list[int]]] = defaultdict(dict)
        names = (OUTCOMES[1], FOREGROUNDS, PREDICTIONS, NETWORK)
        texts = zip(self.seeds.tolist(), *(self.column(name) for name in names), strict=True)
        for place, (seed, *name, predictions, network) in enumerate(texts):
            if predictions and network:
                tests[seed].setdefault(tuple(name), []).append(place)
            elif predictions:
                tests[seed] = {tuple(name): [place]}
        return {seed: dict(sorted(of_seed.items())) for seed, of_seed in tests.items()}

    def _hits(
        self, tests: Iterable[Sequence[int]], n: np.ndarray, labels: np.ndarray, predictions: np.ndarray
    ) -> np.ndarray:
        """Return (I,) which items of tests are right, booleans; the share of draws in which each is, if they differ."""
        parts = []
        for places in tests:
            truth = self.columns.numbers(labels[places[0]], n[places[0]])
            first, *others = (numbers_of(predictions[place], n[place]) == truth for place in places)
            same = all((one == first).all() for one in others)
            parts.append(first if same else np.mean([first, *others], axis=0))
        return _join(parts)

    @cached_property
    def groups(self) -> dict[int, np.ndarray]:
        """The group of each test item by seed, where that is known."""
        return self._numbers(GROUPS)

    def _numbers(self, name: str) -> dict[int, np.ndarray]:
        """Return a packed column by seed, where it is not empty."""
        n, texts = self.column(OUTCOMES[0]), self.column(name)
        first = {seed: [places[0] for places in tests.values()] for seed, tests in self.tests.items()}
        return {
            seed: _join([self.columns.numbers(texts[place], n[place]) for place in places])
            for seed, places in first.items()
            if all(texts[place] for place in places)
        }

    def _clusters(self) -> dict[int, np.ndarray] | None:
        """Return the foreground of each test item by seed; None if one is unknown, or none is shown twice."""
        shown = self._numbers(FOREGROUNDS)
        if not shown or set(shown) != set(self.tests):
            return None
        return shown if np.bincount(np.concatenate(list(shown.values()))).max() > 1 else None


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return parts as one; a single one as it is, which others may share."""
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Setting:
    """The records of one task with all its parameters, one model, and one size unless sizes are compared.

    Attributes:
        task, model: their names, see `add_titles`.
        setting: their parameters, as `row_of` has them.
        n_train: 0 where the task has a success criterion: then all sizes are together.
        track: see `cell.Track`; strategies of two are never ranked together.
        entries: by strategy, kind and budget, sorted.
        others: the records that are not ok, likewise.
    """

    task: str
    model: str
    setting: str
    n_train: int
    track: str
    entries: dict[Key, Entry]
    others: dict[Key, Entry] = field(default_factory=dict)

    @cached_property
    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of task and model; none where it is not said as records say it."""
        try:
            task, model = (part["params"] for part in json.loads(self.setting)[:2])
        except (ValueError, TypeError):
            return {}, {}
        return task, model

    @cached_property
    def records(self) -> int:
        """How many records there are."""
        return sum(entry.size for entry in self.entries.values())

    @cached_property
    def largest(self) -> int:
        """The largest number of training samples."""
        return int(max(entry.sizes.max() for entry in self.entries.values()))

    @property
    def title(self) -> str:
        """What a reader knows it by; training samples where networks are trained for what is tested."""
        samples = f"{self.largest} training samples" if self.largest and self.track != "frozen" else ""
        return ", ".join(filter(None, (self.task, self.model, samples, self.track)))

    @cached_property
    def largest_entries(self) -> dict[Key, Entry]:
        """The entries at the largest number of training samples, of those that have it."""
        return {key: tested for key, entry in self.entries.items() if (tested := entry.at(self.largest)).size}

    @cached_property
    def networks(self) -> dict[int, str]:
        """By seed the networks that are tested as they are, see `Cell.network`; none where repetitions are trained."""
        tested = [entry for entry in self.entries.values() if entry.draws]
        pairs = (zip(entry.seeds.tolist(), entry.column(NETWORK).tolist(), strict=True) for entry in tested)
        return {seed: name for each in pairs for seed, name in each if name}

    @property
    def of(self) -> str:
        """What is compared one by one: seeds, or networks that are tested as they are."""
        return "networks" if self.networks else "seeds"

    @cached_property
    def lone(self) -> bool:
        """Whether all is of one network, so that intervals and tests are over its test items."""
        seeds = [np.unique(entry.seeds) for entry in self.largest_entries.values()]
        return len(np.unique(np.concatenate(seeds))) == 1

    def has(self, metric: str) -> bool:
        """Say whether a metric was measured at the largest number of training samples."""
        return any(entry.by_seed(metric) for entry in self.largest_entries.values())

    @cached_property
    def on_backgrounds(self) -> bool:
        """Whether test groups are numbered 2 class + background, as four named CLASS on BACKGROUND are."""
        frame = next(iter(self.entries.values())).columns.frame
        return sum(self.has(name) for name in frame.columns if ON_BACKGROUND.fullmatch(name)) == 4

    @cached_property
    def has_trials(self) -> bool:
        """Whether the task has a success criterion."""
        return any(entry.trials is not None for entry in self.entries.values())


def key_of(row: Mapping[str, Any]) -> Key:
    """Return which entry a board's row is of."""
    return row["strategy"], row["kind"], row["budget"]


def asked_of(entry: Entry) -> float:
    """Return the share of dense MACs that an entry was asked for; NaN of another budget."""
    return float(entry.column("macs_ratio_asked")[0])


def line_of(key: Key, entry: Entry) -> tuple[str, str, str] | None:
    """Return of which curve over budgets an entry is a point: strategy, kind, and what its budget says besides a share.

    None of dense, and of a budget that is no share of the dense MACs.
    """
    asked = asked_of(entry)
    if key[0] == DENSE or not asked < 1:
        return None
    return key[0], key[1], besides_share(key[2], asked)


def besides_share(budget: str, asked: float) -> str:
    """Return what the label of a budget says besides the share of dense MACs that it asks for."""
    return budget.removeprefix(f"macs {asked:g}").lstrip(", ")


def settings_of(frame: pd.DataFrame) -> list[Setting]:
    """Return the settings of the records that are ok, by task, setting, size and track; the frame is `frame_of`'s."""
    ok, columns = (frame["status"] == "ok").to_numpy(), Columns(frame)
    sizes = frame["n_train"].to_numpy()
    settings = _grouped(columns, np.flatnonzero(ok), np.where(frame["success"].isna(), sizes, 0))
    others = _grouped(columns, np.flatnonzero(~ok), sizes)
    found = []
    for (task, setting, n, track), entries in settings.items():
        model = str(next(iter(entries.values())).column("model")[0])
        beside: dict[Key, list[Entry]] = defaultdict(list)
        for (*where, size, of_track), each in others.items():
            if (*where, of_track) == (task, setting, track) and n in (0, size):
                for key, entry in each.items():
                    beside[key].append(entry)
        joined = {key: Entry(each[0].columns, np.concatenate([e.places for e in each])) for key, each in beside.items()}
        found.append(Setting(task, model, setting, n, track, entries, joined))
    return found


def _grouped(
    columns: Columns, places: np.ndarray, sizes: np.ndarray
) -> dict[tuple[str, str, int, str], dict[Key, Entry]]:
    """Return entries of some records by task, setting, size and track, and by strategy, kind and budget, sorted."""
    keys = columns.frame[["task", "setting", "track", "strategy", "kind", "budget"]].iloc[places]
    names = ["task", "setting", sizes[places], "track", "strategy", "kind", "budget"]
    grouped = keys.groupby(names, sort=False, observed=True).indices if len(places) else {}
    settings: dict[tuple[str, str, int, str], dict[Key, Entry]] = defaultdict(dict)
    for (task, setting, size, track, *key), rows in sorted(grouped.items()):
        settings[task, setting, int(size), track][tuple(key)] = Entry(columns, places[rows])
    return settings


def add_titles(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings, named with what differs among those of the same task and model: parameters, and the track.

    The track is named with the task.
    """
    alike: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for one in settings:
        alike[one.task, one.model].append(one)
    varied = {names: (_varying(group, 0), _varying(group, 1)) for names, group in alike.items()}
    several = {names for names, group in alike.items() if len({one.track for one in group}) > 1}
    named = []
    for one in settings:
        pairs = zip(one.params, varied[one.task, one.model], strict=True)
        task, model = ({key: value for key, value in part.items() if key in group} for part, group in pairs)
        task |= {"track": one.track} if (one.task, one.model) in several else {}
        named.append(replace(one, task=plain(label(one.task, task), 1000), model=plain(label(one.model, model), 1000)))
    return named


def _varying(settings: Sequence[Setting], part: int) -> set[str]:
    """Return the parameters of the task (0) or the model (1) that are not the same in all, or missing in some."""
    params = [one.params[part] for one in settings]
    every = {key for params_of in params for key in params_of}
    return {key for key in every if len({canonical(params_of.get(key)) for params_of in params}) > 1}


NAMED = 5
"""Networks that are named in what a board is about."""
TRACKS = {
    "frozen": "trained without a strategy; strategies act in the test only",
    "tuned": "trained further with the strategy",
    "scratch": "trained with the strategy",
}
"""What the networks of a track are."""
SOURCES = {"photos": "photographs", "pictures": "photographs of a folder", "folder": "pictures of a folder"}
"""What sources of pictures are called besides their names; those of a user's end with a hash."""


def about(setting: Setting) -> str:
    """Return in a sentence each what the data, the networks and the track are."""
    task, model = setting.params
    dense = next((one for key, one in setting.largest_entries.items() if key[0] == DENSE), None)
    pictures = pictures_of(setting)
    data = [f"{pictures} (task {setting.task})" if pictures else f"task {setting.task}"]
    pixels, patch = task.get("canvas"), model.get("patch")
    if isinstance(pixels, int) and isinstance(patch, int) and patch > 0:  # the parameters may be anybody's
        data.append(f"{pixels} x {pixels} pixels in {(pixels // patch) ** 2} patches")
    data += _tested(dense)
    data += [f"class folders are numbered {words}"] if (words := described(task)) else []
    number = len(setting.networks) or (0 if dense is None else len(set(dense.seeds.tolist())))
    size = [f"{name} {model[name]}" for name in ("depth", "dim", "heads", "patch") if name in model]
    size += [f"{weights / 1e6:.2g} M weights"] if dense and (weights := dense.over_seeds("parameters")) else []
    size += ["in bfloat16"] if model.get("precision") == "bfloat16" else []
    size += [few(sorted(setting.networks.values()), NAMED)] if setting.networks else []
    named = f"{number or 'no'} network{'s' * (number != 1)} of model {setting.model}"
    networks = " ".join([named, *([f"({', '.join(size)})"] if size else [])])
    track = TRACKS.get(setting.track, setting.track)
    return plain(f"Data: {', '.join(data)}. {networks}, {track} (track {setting.track}).", 1000)


def pictures_of(setting: Setting) -> str:
    """Return in words what the pictures of a task are made of; nothing where it has none."""
    names = (setting.params[0].get(key) for key in ("images", "backgrounds"))
    return " on ".join(SOURCES.get(x.partition("-")[0], x) for x in names if isinstance(x, str) and x)


def _tested(dense: Entry | None) -> list[str]:
    """Return how many classes and test images there are, as far as that is known."""
    if dense is None:
        return []
    items, labels, _ = (dense.column(name) for name in OUTCOMES)
    known = [(n, text) for n, text in zip(items.tolist(), labels, strict=True) if n]
    if not known:
        return []
    classes = set[int]().union(*(dense.columns.numbers(text, n).tolist() for n, text in known))
    return [f"{len(classes)} classes", f"{known[0][0]:,} test images for each network"]
