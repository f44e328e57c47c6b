"""The columns of a leaderboard: what each holds, in which unit, and how it is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from sparsebench.measure.metrics import MetricKind
from sparsebench.stats.intervals import BELOW
from sparsebench.strategy.budget import ANY_SITE

if TYPE_CHECKING:
    import pandas as pd

    from sparsebench.stats.intervals import Interval

RANK_ENDS = ("rank_low", "rank_high")
"""Columns of rows with the best and the worst possible rank; NaN if not ranked."""
LIMITS = "numbers of images"
"""Key of the smallest and the largest number of training images of a row's images to target."""
NOT_REACHED, NOT_RANKED = "not reached", "not ranked"
DIGITS = 6
"""Significant digits of numbers in the data of pages, and of percentages before they are rounded."""
TOLERANCE = 0.02
"""Relative deviation of the realised MACs from the budget above which the board shows the realised MACs."""
Row = dict[str, Any]
"""The values of one row of a table, by column key."""

Shown = Literal[
    "text",
    "link",
    "fraction",
    "percent",
    "spent",
    "points",
    "samples",
    "ratio",
    "times",
    "speed",
    "count",
    "p",
    "giga",
    "mega",
]
WORDS = ("text", "link")
"""Formats of columns without numbers."""
UNITS: dict[Shown, str] = {"percent": "%", "points": "points"}
"""Units that are appended to headings."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        key: key of its value in a row.
        heading: heading without the unit.
        shown: number format, or text. "percent" and "points" show fractions and their differences, times 100. "spent"
            is percent, followed by the realised MACs, KEY_spent, if they differ from the budget. "giga" and "mega" show
            plain numbers. Files have fractions and plain numbers. "link" is an address.
        what: meaning in one sentence, with the unit.
        interval: whether rows have its 95 % interval as KEY_low and KEY_high, which are None if unknown.
        part: in a board over all tasks each part is taken from one task: "accuracy", "sample complexity",
            "spurious gap", or the name of a metric that a task declares; "" if the column is about all tasks.
        tables: whether tables show it; CSV and JSON have every column.
        task: the task that it was taken from; "" if it is about all tasks, or if each row names its task.
        falling: whether sorting by it puts large numbers first, because they are better.
    """

    key: str
    heading: str
    shown: Shown
    what: str
    interval: bool = False
    part: str = ""
    tables: bool = True
    task: str = ""
    falling: bool = True

    @property
    def title(self) -> str:
        """The heading with the unit."""
        return f"{self.heading}, {UNITS[self.shown]}" if self.shown in UNITS else self.heading

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its value in a row, and of the ends of its interval, if any."""
        return (self.key, *(f"{self.key}{end}" for end in ("_low", "_high") if self.interval))


ALL_COLUMNS = (
    Column("task", "task", "text", "name of the task"),
    Column("model", "model", "text", "name of the model"),
    Column("n_train", "N", "count", "training samples; the largest number if trials have several"),
    Column(
        "rank",
        "rank",
        "text",
        "by accuracy; 3-9: two rows are significantly better than it, six do not differ significantly from it, and "
        "all others are worse",
    ),
    Column("strategy", "strategy", "text", "name, with the parameters that differ from their defaults"),
    Column("kind", "kind", "text", "baseline, deployable or oracle; oracles see which tokens matter"),
    Column("trained", "trained", "text", "whether it has parameters that are trained with the network"),
    Column("variant", "variant", "text", "yes: not the published method; a note says how it differs"),
    Column(
        "budget",
        "budget",
        "text",
        "requested share of dense MACs or keep rate, and the blocks in which tokens are removed",
    ),
    Column("macs_ratio", "MACs / dense", "fraction", "realised MACs as a share of the dense ones", falling=False),
    Column("accuracy", "accuracy", "percent", "test accuracy, mean over seeds", True, "accuracy"),
    Column(
        "accuracy_delta",
        "gain over dense",
        "points",
        "difference of accuracy to dense, paired by seed",
        True,
        "accuracy",
    ),
    Column(
        "versus_dense",
        "vs dense",
        "text",
        "better, worse or not significant, corrected for all differences to dense, as intervals are not",
        False,
        "accuracy",
    ),
    Column(
        "random_delta",
        "gain over random at its site",
        "points",
        "difference of accuracy to random tokens at the same budget: to random for strategies that act at the input, "
        "to random_inside for others",
        True,
        "accuracy",
    ),
    Column(
        "versus_random",
        "vs random at its site",
        "text",
        "better, worse or not significant, corrected for all differences to random tokens, as intervals are not",
        False,
        "accuracy",
    ),
    Column(
        "pareto",
        "Pareto",
        "text",
        "no: a ranked row with no more MACs is significantly more accurate",
        False,
        "accuracy",
    ),
    Column(
        "sample_complexity",
        "N50",
        "samples",
        "training samples at which half of the trials succeed; not reached: the largest number tried is too small",
        True,
        "sample complexity",
        falling=False,
    ),
    Column(
        "sample_complexity_ratio",
        "N50 / dense",
        "ratio",
        "N50 divided by that of dense",
        True,
        "sample complexity",
        falling=False,
    ),
    Column(
        "sample_complexity_loss",
        "N50, loss",
        "samples",
        "N50 by the paper's criterion, the test loss, if the task's criterion is the test error",
        True,
        "sample complexity",
        falling=False,
    ),
    Column(
        "images_to_target_rank",
        "rank, images",
        "text",
        "rank by images to target, without significance; ties are equal numbers, and all below or all above the "
        "numbers tried",
        False,
        "images to target",
    ),
    Column(
        "images_to_target",
        "images to target",
        "samples",
        "training images with which the probe reaches chance + .9 (dense with the most images - chance); < or >: it is "
        "beyond the numbers tried",
        True,
        "images to target",
        falling=False,
    ),
    Column(
        "images_to_fixed_target",
        "images to fixed target",
        "samples",
        "training images with which the probe reaches the accuracy that the suite names",
        True,
        "images to target",
        falling=False,
    ),
    Column(
        "linear_accuracy",
        "linear",
        "percent",
        "test accuracy of the linear probe with the most training images, mean over seeds",
        True,
        "images to target",
    ),
    Column(
        "linear_delta",
        "linear over dense",
        "points",
        "difference of the linear probe's accuracy to that of dense, paired by seed",
        True,
        "images to target",
    ),
    Column(
        "linear_random_delta",
        "linear over random tokens",
        "points",
        "difference of the linear probe's accuracy to that of random tokens at the same site and budget",
        True,
        "images to target",
    ),
    Column(
        "neighbour_accuracy",
        "neighbours",
        "percent",
        "test accuracy of the nearest neighbours among the most training images, mean over seeds",
        True,
        "images to target",
    ),
    Column(
        "neighbour_delta",
        "neighbours over dense",
        "points",
        "difference of the neighbours' accuracy to that of dense, paired by seed",
        True,
        "images to target",
    ),
    Column(
        "neighbour_random_delta",
        "neighbours over random tokens",
        "points",
        "difference of the neighbours' accuracy to that of random tokens at the same site and budget",
        True,
        "images to target",
    ),
    Column(
        "linear_images_per_s",
        "features/s",
        "speed",
        "images whose features are computed in a second, median over seeds",
        False,
        "images to target",
    ),
    Column(
        "iou",
        "IoU",
        "percent",
        "intersection over union of predicted and true patches, mean over object classes, then over seeds",
        True,
        "patches",
    ),
    Column(
        "iou_delta", "IoU over dense", "points", "difference of IoU to that of dense, paired by seed", True, "patches"
    ),
    Column(
        "iou_random_delta",
        "IoU over random tokens",
        "points",
        "difference of IoU to that of random tokens at the same site and budget",
        True,
        "patches",
    ),
    Column("iou_pixels", "IoU, pixels", "percent", "IoU on pixels, with upsampled scores of patches", False, "patches"),
    Column("accuracy_relevant", "objects", "percent", "accuracy on patches of objects", False, "patches"),
    Column("accuracy_irrelevant", "background", "percent", "accuracy on patches of the background", False, "patches"),
    Column(
        "accuracy_boundary",
        "boundary",
        "percent",
        "accuracy on patches with pixels of several classes",
        False,
        "patches",
    ),
    Column(
        "aligned_gap",
        "gap",
        "percent",
        "accuracy on images whose background fits the class, minus accuracy on the other images",
        True,
        "spurious gap",
        falling=False,
    ),
    Column(
        "aligned_gap_reduction",
        "gap reduction",
        "points",
        "gap of dense minus gap of the strategy, paired by seed",
        True,
        "spurious gap",
    ),
    Column(
        "worst_group_accuracy",
        "worst group",
        "percent",
        "accuracy of the group with the lowest mean over seeds",
        False,
        "spurious gap",
    ),
    Column(
        "spurious_gap",
        "average - worst",
        "percent",
        "average minus worst-group accuracy, computed for each seed",
        False,
        "spurious gap",
        falling=False,
    ),
    Column(
        "spurious_gap_reduction",
        "its reduction",
        "points",
        "average minus worst-group accuracy: that of dense minus that of the strategy, paired by seed",
        True,
        "spurious gap",
        tables=False,
    ),
    Column(
        "selection_auroc",
        "AUROC",
        "fraction",
        "how well scores separate relevant tokens from the others",
        False,
        "accuracy",
    ),
    Column("images_per_s", "images/s", "speed", "median speed of the test on its device", False, "accuracy"),
    Column("device", "device", "text", "cpu or the name of the GPU on which images/s were measured", False, "accuracy"),
    Column(
        "pareto_speed",
        "Pareto, speed",
        "text",
        "no: a ranked row that is no slower on this device is significantly more accurate",
        False,
        "accuracy",
    ),
    Column("n_seeds", "seeds", "count", "repetitions"),
    Column("checks", "checks", "text", "result of `sparsebench check` for this source and version"),
    Column("badge", "badge", "text", "badge of a submission, from its files alone: reported, replayed or rejected"),
    Column(
        "how",
        "reduction",
        "text",
        "what happens to tokens: drop (removed), fuse (joined into one), merge (averaged in groups), mix (added to "
        "others by weights), rest (skip a block), trained (learned with the network), truth (an oracle)",
    ),
    Column(
        "kept_accuracy",
        "kept accuracy",
        "fraction",
        "mean accuracy over MACs / dense from the lowest budget to 1, linearly interpolated between budgets, "
        "divided by dense's accuracy; - if the lowest budget is not reached or costs as much as the next",
        True,
    ),
    Column(
        "kept_accuracy_rank",
        "rank",
        "text",
        "rank of the strategy by kept accuracy, which the printed table of a board over several budgets has",
        tables=False,
    ),
    Column(
        "macs_at_2",
        "MACs at -2 points",
        "fraction",
        "smallest MACs / dense down to which accuracy stays within 2 points of dense's, linearly interpolated; "
        "not reached: the largest budget loses more; <=: the lowest budget loses less",
        True,
        falling=False,
    ),
    Column(
        "speed_up", "speed-up", "times", "images/s divided by dense's on the same seed and machine, median over seeds"
    ),
    Column("p_label", "p(label)", "fraction", "mean probability of the correct class in the test"),
    Column(
        "schedule",
        "schedule",
        "text",
        "the chosen schedule (budget auto): tokens after blocks; or names, if seeds differ, with numbers of seeds",
    ),
    Column("track", "track", "text", "scratch, frozen or tuned: how networks are trained with a strategy"),
    Column("class_folders", "class folders", "text", "rule by which class folders were numbered", tables=False),
)
"""All columns of boards, in order."""
BY_KEY = {column.key: column for column in ALL_COLUMNS}
BY_TASK = ALL_COLUMNS[:3]
"""The columns that only a board by task has, at its left."""
OF_PROBES = tuple(column.key for column in ALL_COLUMNS if column.part in ("images to target", "patches"))
FROM_CHECKS = tuple(column.key for column in ALL_COLUMNS[ALL_COLUMNS.index(BY_KEY["checks"]) :])
SOMETIMES = ("variant", "sample_complexity_loss", *OF_PROBES, *FROM_CHECKS)
"""Keys of columns that a board has only if a row has a value."""
ALWAYS_SHOWN = tuple(column for column in ALL_COLUMNS[3:] if column.key not in SOMETIMES)
"""The columns that every board has."""


FORMAT_OF_UNIT: dict[str, Shown] = {"fraction": "fraction", "samples": "samples", "images/s": "speed"}


def column_of(kind: MetricKind) -> Column:
    """Return the column of a metric that a task declares."""
    return Column(
        kind.name,
        kind.heading,
        FORMAT_OF_UNIT.get(kind.unit, "ratio"),
        f"{kind.what}, in {kind.unit}",
        part=kind.name,
        falling=kind.more_is_better is not False,
    )


def accuracy_at(budget: float) -> Column:
    """Return the column of the accuracy at one budget, for a board over several budgets."""
    meaning = f"accuracy in % at a budget; in ( ) realised MACs / dense that miss the budget by over {TOLERANCE:.0%}"
    return Column(f"accuracy_at_{budget:g}", "@" + f"{budget:g}".removeprefix("0"), "spent", meaning)


def keys_of(columns: Sequence[Column]) -> list[str]:
    """Return the keys of columns in a row, in order."""
    return [key for column in columns for key in column.keys]


def side(column: Column) -> str:
    """Return the alignment of a column: left for text, right for numbers and ranks."""
    return "left" if column.shown in WORDS and column.key != "rank" else "right"


def interval_row(key: str, interval: Interval | None) -> Row:
    """Return an interval as three columns, with None for unknown values and without minus zero."""
    value, low, high = interval or (None, None, None)
    values = {key: value, f"{key}_low": low, f"{key}_high": high}
    return {name: None if x is None or math.isnan(x) else x + 0.0 for name, x in values.items()}


def rank_text(low: int, high: int) -> str:
    """Return a range of possible ranks as text, such as "3-9"; one number if both ends are equal."""
    return f"{low}-{high}" if low < high else f"{low}"


def points(share: float) -> str:
    """Return a difference of fractions in points, with its sign."""
    text = percent(share)
    if not float(text):
        return "0.0"
    return text if share < 0 else f"+{text}"


def file_value(row: Row, key: str) -> Any:
    """Return a row's value for files: text in place of infinity, which JSON does not have, and of bounds."""
    value = row.get(key)
    if key.startswith("images_to") and row.get(LIMITS) is not None:
        smallest, largest = row[LIMITS]
        bounds: dict[Any, str] = {BELOW: f"< {smallest}", math.inf: f"> {largest}"}
        return bounds.get(value, value)
    if row.get(f"{key}_at_most"):
        return f"<= {value:.3f}"
    return NOT_REACHED if value == math.inf else value


def text_of(row: Row, column: Column) -> str:
    """Return the text of a row's value, followed by its interval if any; "-" if there is no value."""
    value, *interval = (_number(file_value(row, key), column.shown) for key in column.keys)
    if column.shown == "spent" and row.get(f"{column.key}_spent") is not None:
        return f"{value} ({row[f'{column.key}_spent']:.2f})"
    bounded = value == NOT_REACHED or bool(row.get(f"{column.key}_at_most"))
    if not interval or row.get(column.keys[1]) is None or bounded:
        return value
    return f"{value} [{interval[0]}, {interval[1]}]"


def _number(value: Any, kind: Shown) -> str:
    if value is None or value in ("", NOT_RANKED):
        return "-"
    if not isinstance(value, float):
        return str(value)
    form = FORMS.get(kind, ".3f")
    return format(value, form) if isinstance(form, str) else form(value)


def _three_digits(x: float) -> str:
    """Return a number with three significant digits, but at least all digits before the point."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" if x > 0 else f"{x:g}"


def percent(share: float) -> str:
    """Return a fraction in percent. Ties are rounded away from zero, as the scripts of pages round them."""
    value = 100 * float(f"{share:.{DIGITS}g}")
    if not math.isfinite(value):
        return str(value)
    return f"{Decimal(value).quantize(Decimal('0.1'), ROUND_HALF_UP):f}"


FORMS: dict[Shown, str | Callable[[float], str]] = {
    "samples": ".3g",
    "ratio": ".3g",
    "speed": ",.0f",
    "count": "g",
    "p": ".2g",
    "times": ".2f",
    "points": points,
    "percent": percent,
    "spent": percent,
    "giga": lambda x: _three_digits(x / 1e9),
    "mega": lambda x: _three_digits(x / 1e6),
}
"""Number formats; the default has three digits after the point."""


FLAGS = ("trained", "pareto", "pareto_speed")
"""Columns with "yes" or "no" in files."""


def over_budget(rows: pd.DataFrame) -> pd.Series:
    """Return which rows have spent over TOLERANCE more than their requested share of dense MACs."""
    return rows["macs_ratio"] > (1 + TOLERANCE) * rows["asked"].astype(float)


def dicts(rows: pd.DataFrame) -> list[Row]:
    """Return the rows of a DataFrame as mappings of plain Python values, with None where a value is missing.

    This is several times faster than `DataFrame.to_dict`: a board has many columns and few rows.
    """
    names = [str(name) for name in rows.columns]
    values = rows.to_numpy(dtype=object, copy=True)
    values[rows.isna().to_numpy(dtype=bool)] = None
    return [dict(zip(names, map(_plain, row), strict=True)) for row in values.tolist()]


def _plain(value: object) -> object:
    """Return a number of numpy, which columns of objects may have, as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def frame(rows: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """Return the rows of a board for users; `attrs` has the meaning of each column, with its unit.

    Flags are booleans. "not reached" is infinity. `rank_low` and `rank_high` are the first and last rank. Each
    parameter of a strategy that differs from its default is a column `strategy.NAME`. The amount of a budget is
    `budget.macs` or `budget.keep_rate`.
    """
    import pandas as pd

    table = rows.reindex(columns=keys_of(columns)).reset_index(drop=True)
    attrs = {key: column.what for column in columns for key in column.keys}
    for key in (column.key for column in columns if column.interval):
        attrs |= {f"{key}_{end}": f"{end} end of the 95 % interval of {key}" for end in ("low", "high")}
    for name in FLAGS:
        table[name] = table[name].map({"yes": True, "no": False}).astype("boolean")
    for column in (column for column in columns if column.shown not in WORDS):
        for key in column.keys:
            table[key] = pd.to_numeric(table[key])
        if f"{column.key}_at_most" in rows:
            table[f"{column.key}_at_most"] = rows[f"{column.key}_at_most"].eq(True).to_numpy()
            attrs[f"{column.key}_at_most"] = f"whether {column.key} may be smaller: no lower budget was tried"
    _add_parts(table, attrs, rows)
    table.attrs = attrs
    return table


def _add_parts(table: pd.DataFrame, attrs: dict[str, str], rows: pd.DataFrame) -> None:
    """Add the parts of ranks, strategies and budgets as columns.

    Args:
        table: the table for users.
        attrs: the meanings of its columns.
        rows: the same rows as the board has them.
    """
    parts = rows.reindex(columns=[*RANK_ENDS, "strategy_params", "budget_amount", "budget_value"])
    for name in RANK_ENDS:
        table[name] = parts[name].to_numpy(float)
    attrs |= {"rank_low": "best possible rank", "rank_high": "worst possible rank"}
    params = [json.loads(text) if isinstance(text, str) else {} for text in parts["strategy_params"]]
    amounts: list[dict[str, float]] = []
    for name, value in zip(parts["budget_amount"], parts["budget_value"], strict=True):
        amounts.append({name: float(value)} if name in ANY_SITE else {})
    for owner, values_of_rows in (("strategy", params), ("budget", amounts)):
        for name in sorted({name for values in values_of_rows for name in values}):
            table[f"{owner}.{name}"] = [values.get(name) for values in values_of_rows]
            attrs[f"{owner}.{name}"] = f"{name} of the {owner}; missing if it is the default or was not given"
