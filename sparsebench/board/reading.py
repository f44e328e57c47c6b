"""The records of a folder as a table, with all columns that boards read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board.columns import ALL_COLUMNS
from sparsebench.errors import UserError, plain
from sparsebench.measure.metrics import GROUP as OF_GROUPS
from sparsebench.measure.metrics import METRICS as SHIPPED_METRICS
from sparsebench.measure.metrics import MetricKind
from sparsebench.records import manifests, reports, table
from sparsebench.records.record import SHIPPED, canonical
from sparsebench.records.reports import CHECKS, REMARK, UNCHECKED
from sparsebench.records.store import Store
from sparsebench.records.table import FOREGROUNDS, GROUPS, IDENTITY, ITEMS, NEIGHBOURS, OUTCOMES
from sparsebench.strategy.base import reduction_of

NO_BADGES: Mapping[str, str] = MappingProxyType({})
"""The badges of a folder that is not a submission."""
Flats = Iterable[Mapping[str, Any]]
"""Flat records: mappings, or a DataFrame."""
DENSE = "dense"
WITH_COLUMN = tuple(kind for kind in SHIPPED_METRICS if kind.over_seeds != "none" and not kind.name.endswith(OF_GROUPS))
"""The metrics of sparsebench that have a column. Some of these columns are not plain means over seeds."""
METRICS = (
    *(kind.name for kind in WITH_COLUMN),
    "success",
    "success_loss",
    "fitted",
    "macs",
    "macs_ratio_planned",
    "accuracy_top5",
    "neighbour_accuracy",
    "selection_precision",
    "parameters",
    "timed_batch",
)
"""The metrics that the board reads, besides accuracies of groups and metrics that tasks declare."""
ORDER = ["n_train", "repetition", "cell_id"]
"""Order of records. Floating-point sums depend on the order, and the board must not."""
SEED = "seed"
"""The column of the unit of paired comparisons: the number of the tested network, otherwise the repetition."""
DRAW = "draw"
"""The column that numbers the tests of one network; 0 if each repetition trains its own network."""
VARIANT, DIFFERS = "variant", "differs"
"""Columns of a variant of its paper's method: "yes", and how it differs, in one sentence."""
ENTRY = "entry"
"""The column that numbers the combinations of KEY, in order."""
KEY = ["strategy", "kind", "budget"]
"""Columns that identify a row of a board."""
DECLARED, MAIN, SUCCESS, TARGET = "metrics of tasks", "main tasks", "metric of success", "target of probes"
"""Attributes of a table of records: the metrics that its tasks declare, the main tasks of its suites, the suites'
metric of success for sample complexity, by default `success`, and their fixed target of probes, by default none. They
are attributes because users pass the table from `load_records` to `leaderboard`. They are plain data, because pandas
stores them as JSON in some files: a metric is the mapping of its fields."""
WEIGHTS = "weights"
"""The column of the name of the tested network in cells. A file of weights is named by a hash of its content there."""
ON_BACKGROUND = re.compile(r"accuracy: .+ on .+(?<!\.low)(?<!\.high)")
"""Names of the accuracies of groups, if each group is a class on a background."""
TRACK = "scratch"
"""The track of records without a track."""
TEXTS = (
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
    VARIANT,
    DIFFERS,
    "badge",
    "how",
    "site",
    "network",
    "schedule",
    *OUTCOMES[1:],
    GROUPS,
    FOREGROUNDS,
    NEIGHBOURS,
)
DEFAULTS = dict.fromkeys(TEXTS, "") | {
    "track": TRACK,
    CHECKS: UNCHECKED,
    "distribution": SHIPPED,
    "n_train": 0,
    "repetition": 0,
    ITEMS: 0,
}
"""The columns that the board reads besides metrics, with their values for a table without them."""
DEFAULT_IDENTITY = dict.fromkeys(IDENTITY, "") | {"strategy_params": "{}", "budget_where": "both"}
"""The columns IDENTITY of a row without a cell. The labels then stand for the name and for the value of the budget."""


# From a folder


def read(
    folder: Path | Store, metrics: Container[str] | None = METRICS, badges: Mapping[str, str] = NO_BADGES
) -> pd.DataFrame:
    """Return the records of a run's folder as a table, with the columns that `describe` adds.

    The table has the plain columns of `table`, the columns IDENTITY, outcomes, metrics that tasks declare, and
    `metrics`. Its attributes DECLARED, MAIN and SUCCESS describe the declared metrics and the suites' boards.
    Predictions are decoded later, when they are used. Users' folders of pictures and files of weights have their names
    in place of hashes.

    Args:
        folder: the run's folder.
        metrics: names of the metrics to read; None for all.
        badges: see `describe`.

    Raises:
        UserError: as `Store.rows`.
    """
    opened = Store.open(folder)
    declared = manifests.metrics(opened)
    unread = {*table.PARTS, table.RANKS, "memory", table.CHECKSUM} - {"cell", "schedule"}
    names_declared = {kind.name for kind in declared}

    def is_read(name: str) -> bool:
        if not table.is_metric(name):
            return name not in unread
        if metrics is None or name in metrics or name in names_declared:
            return True
        return ON_BACKGROUND.fullmatch(name) is not None

    records = _in_order(opened, is_read)
    if not (records["status"] == "ok").any():
        # Without a result records have no metrics, so their columns are added here.
        names = [kind.name for kind in (*SHIPPED_METRICS, *declared) if not kind.name.endswith(OF_GROUPS)]
        missing = [name for name in names if name not in records and is_read(name)]
        records = records.assign(**dict.fromkeys(missing, math.nan))

    records = _with_identities(records)
    records = _with_names(records, manifests.file_names(opened))
    records = describe(records, opened, badges)
    records.attrs |= _attributes(opened, declared)
    return records


def _in_order(opened: Store, is_read: table.Columns) -> pd.DataFrame:
    """Return the records of a folder in ORDER, with the columns that are read."""
    import pyarrow as pa

    rows = opened.rows(is_read).drop_columns([table.CHECKSUM])
    rows = rows.sort_by([(name, "ascending") for name in ORDER])
    compact = {pa.string(), pa.binary()}  # as objects of Python they would need far more memory
    return rows.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if kind in compact else None)


def _attributes(opened: Store, declared: Iterable[MetricKind]) -> dict[str, Any]:
    """Return the attributes of the table of a folder's records."""
    # The suite with the most settings comes first.
    suites = sorted(manifests.suites(opened), key=lambda suite: len(suite.settings), reverse=True)
    mains = [suite.main_task for suite in suites if suite.main_task]
    attributes: dict[str, Any] = {DECLARED: [asdict(kind) for kind in declared], MAIN: list(dict.fromkeys(mains))}
    success = [suite.sample_complexity for suite in suites if suite.sample_complexity]
    if success:
        attributes[SUCCESS] = success[0]
    of_probes = [suite.target for suite in suites if suite.target]
    if of_probes:
        attributes[TARGET] = of_probes[0]
    return attributes


def _with_identities(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with the columns IDENTITY in place of their cells."""
    grouped = records.groupby(["cell", "strategy", "budget", "track"], observed=True, sort=False, dropna=False)
    rows = []
    for cell, strategy, budget, track in grouped.groups:
        try:
            rows.append(table.identity_of(cell, strategy, track))
        except (ValueError, UserError):  # no cell, or a file that sparsebench did not write
            rows.append(DEFAULT_IDENTITY | {"strategy_name": strategy, "budget_value": budget})
    return _with_columns(records.drop(columns="cell"), grouped, pd.DataFrame(rows, columns=list(IDENTITY)))


def _with_columns(records: pd.DataFrame, grouped: Any, columns: pd.DataFrame) -> pd.DataFrame:
    """Return records with columns that have one row for each group of the records."""
    number = grouped.ngroup()
    return records.assign(**{name: pd.Categorical(values).take(number) for name, values in columns.items()})


def _with_names(records: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return records with the names of users' folders of pictures and files of weights in place of hashes.

    The hash follows a name that settings also use for something else, such as shipped pictures. The column WEIGHTS has
    the networks with their hashes.
    """
    settings = records["setting"].astype("category")
    networks = records["network"].astype("category")
    text = "\n".join(settings.cat.categories)
    names = {name: f"{file} ({name})" if canonical(file) in text else file for name, file in names.items()}
    in_json = {canonical(name): canonical(file) for name, file in names.items()}
    any_name = re.compile("|".join(map(re.escape, in_json)) or "(?!)")

    def in_setting(setting: str) -> str:
        return any_name.sub(lambda match: in_json[match[0]], setting)

    def in_network(network: str) -> str:
        return " ".join(names.get(name, name) for name in network.split(" "))

    return records.assign(
        setting=settings.cat.rename_categories(in_setting),
        network=networks.cat.rename_categories(in_network),
        **{WEIGHTS: networks},
    )


def describe(records: pd.DataFrame, folder: Path | Store, badges: Mapping[str, str] = NO_BADGES) -> pd.DataFrame:
    """Return records with columns on their strategies: checks, remark, trained, variant, differs, badge, how, site.

    Args:
        records: the records of a run's folder, with the columns IDENTITY.
        folder: the folder, which describes the strategies and has the reports of their checks.
        badges: badges of submitted strategies, by name; the folder itself cannot say them.
    """
    opened = Store.open(folder)
    checked = reports.read(opened)
    strategies = manifests.strategies(opened)
    columns = ["strategy", "strategy_name", "strategy_params", "revision"]
    grouped = records.groupby(columns, observed=True, sort=False)
    rows = []
    for strategy, name, params, revision in grouped.groups:
        checks, remark = reports.badge_of(checked, strategy, revision)
        row = {CHECKS: checks, REMARK: remark, "trained": "", "badge": badges.get(name, "")}
        row |= {"how": "", "site": "", VARIANT: "", DIFFERS: ""}
        entry = strategies.get((name, revision))
        if entry is not None:
            row["trained"] = "yes" if entry.trained else "no"
            row["how"] = plain(reduction_of(entry.how, json.loads(params)))
            row["site"] = entry.site
            if entry.variant:
                row |= {VARIANT: "yes", DIFFERS: plain(entry.variant, 300)}
        rows.append(row)
    return _with_columns(records, grouped, pd.DataFrame(rows))


# For the board


def frame_of(records: Flats) -> pd.DataFrame:
    """Return flat records as a table with all columns that the board reads, sorted by ORDER.

    Three of these columns are computed here: SEED, DRAW and ENTRY. A table that has them is returned as it is.
    """
    frame = records if isinstance(records, pd.DataFrame) else pd.DataFrame(list(records))
    if ENTRY in frame:
        return frame
    if "cell" in frame:
        frame = _with_identities(frame)
    missing = {name: value for name, value in DEFAULTS.items() if name not in frame}
    if WEIGHTS not in frame:  # a table that was not read from a folder has the names of cells
        missing[WEIGHTS] = frame.get("network", "")
    frame = frame.assign(**missing, **_numbers(frame))
    frame = _with_labels_as_identities(frame)
    frame = frame.sort_values(ORDER, kind="stable", ignore_index=True)

    # The seed of a record that tests a network is the network's number; its repetition is then a draw.
    network = frame["network"].astype(str)
    number = {name: place for place, name in enumerate(sorted(set(network) - {""}))}
    frame[SEED] = frame["repetition"].where(network == "", network.map(number)).astype(int)
    frame[DRAW] = frame["repetition"].where(network != "", 0).astype(int)
    frame[ENTRY] = frame[KEY].astype(str).groupby(KEY).ngroup()
    return frame


def _numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics that the board reads; NaN in those that a table lacks."""
    names = [*METRICS, "macs_ratio_asked", *(kind.name for kind in metrics_of(frame))]
    numbers = frame.reindex(columns=list(dict.fromkeys(names)))
    success = frame.attrs.get(SUCCESS)
    if success in frame:
        numbers["success"] = frame[success]
    numbers = numbers.astype(float)
    of_trials = ["success", "success_loss"]
    numbers[of_trials] = numbers[of_trials].clip(0, 1)
    return numbers


def _with_labels_as_identities(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose rows all have the columns IDENTITY; see DEFAULT_IDENTITY."""
    defaults = DEFAULT_IDENTITY | {"strategy_name": frame["strategy"], "budget_value": frame["budget"]}
    columns = {}
    for name, default in defaults.items():
        if name not in frame:
            columns[name] = default
        elif frame[name].isna().any():
            columns[name] = frame[name].astype(object).where(frame[name].notna(), default)
    return frame.assign(**columns)


def metrics_of(frame: pd.DataFrame) -> list[MetricKind]:
    """Return the metrics whose columns are means or medians over seeds: some of WITH_COLUMN, and those of tasks."""
    columns = {column.key for column in ALL_COLUMNS}
    shown = [kind for kind in WITH_COLUMN if kind.name not in columns]
    declared = [MetricKind(**fields) for fields in frame.attrs.get(DECLARED, ())]
    return [*shown, *(kind for kind in declared if kind.over_seeds != "none")]


# Values of entries


def dense_of(records: pd.DataFrame) -> pd.DataFrame:
    """Return the records of dense."""
    return records[records[ENTRY] == entry_of_dense(records)]


def entry_of_dense(records: pd.DataFrame) -> int | None:
    """Return the entry of dense; None without dense."""
    entries = records.loc[records["strategy"] == DENSE, ENTRY]
    return None if entries.empty else int(entries.min())


def over_seeds(records: pd.DataFrame, aggregation: Mapping[str, str]) -> pd.DataFrame:
    """Return metrics over seeds, one row for each entry; NaN if nothing was measured.

    Args:
        records: the records; several draws on a network are averaged first.
        aggregation: "mean" or "median", by metric.
    """
    by_seed = records.groupby([ENTRY, SEED])[list(aggregation)].mean()
    entries, first = np.unique(by_seed.index.get_level_values(ENTRY), return_index=True)
    columns = {}
    for name, kind in aggregation.items():
        seeds = (part[~np.isnan(part)] for part in np.split(by_seed[name].to_numpy(), first[1:]))
        # NumPy, as means of pandas can differ in the last digit, which would change the order of equal strategies.
        columns[name] = [getattr(np, kind)(values) if values.size else math.nan for values in seeds]
    return pd.DataFrame(columns, entries, dtype=float)


def speed_ups(records: pd.DataFrame) -> pd.Series:
    """Return for each timed entry the median over seeds of images/s divided by dense's on the same seed and machine."""
    where = [SEED, "device", "environment"]
    timed = records.loc[records["images_per_s"].notna(), [ENTRY, "strategy", "images_per_s", *where]]
    timed = timed.astype(dict.fromkeys(where[1:], str))
    base = dense_of(timed).drop_duplicates(where, keep="last").set_index(where)["images_per_s"]
    ratio = timed["images_per_s"] / timed[where].join(base[base > 0], on=where)["images_per_s"]
    return ratio.groupby(timed[ENTRY]).median().dropna()
