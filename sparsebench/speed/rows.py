"""What a measurement of speed comes to: rows, their marks, and files of them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

TIMM_COLUMNS = (
    "model", "infer_img_size", "infer_samples_per_sec", "infer_step_time", "infer_batch_size", "param_count",
    "infer_gmacs", "infer_macts",
)  # fmt: skip
"""The header of timm's tables of inference speed; step times are in milliseconds, parameters in millions."""
NOISE = 0.03


@dataclass(frozen=True)
class Row:
    """One network at one batch size and precision, eager or compiled.

    Attributes:
        strategy: the words of the strategy, or dense.
        mode: eager or compiled.
        p50, p95: seconds a batch, median and 95th percentile.
        choice: seconds a batch in the strategy's `plan`, with what it reads; None for dense or compiled networks.
        memory: most bytes of the GPU in use; None on a CPU.
        speedup: over the eager dense network of the same batch and precision; the median of the ratios turn by turn.
        spread: how far the same dense network, measured again, is from a ratio of 1 to itself.
        macs: MACs of one image.
        macs_ratio: MACs of the dense network divided by those of this one.
        tokens: patch tokens after the last block.
        problem: why there are no times, or nothing.
    """

    model: str
    strategy: str
    mode: str
    precision: str
    batch: int
    image: int
    parameters: int
    macs: float
    macs_ratio: float
    tokens: float
    p50: float | None = None
    p95: float | None = None
    choice: float | None = None
    memory: int | None = None
    speedup: float | None = None
    speedup_compiled: float | None = None
    spread: float | None = None
    problem: str = ""

    @property
    def share(self) -> float | None:
        """What is reached of the MACs ratio."""
        return None if self.speedup is None else self.speedup / self.macs_ratio


def marks(row: Row) -> list[str]:
    """Return what is odd about a row: a speed-up above the MACs ratio, a spread over 3 %.

    The speed-up is held against the dense network of the same mode: compiling alone makes a network faster.
    """
    same = row.speedup_compiled if row.mode == "compiled" else row.speedup
    over = row.strategy != "dense" and same is not None and same > row.macs_ratio
    wide = row.spread is not None and row.spread > NOISE
    return ["above the MACs ratio"] * over + ["spread over 3 %"] * wide


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios, turn by turn."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def percentile(seconds: Sequence[float], share: float) -> float:
    """Return the value that this share of the times does not exceed, the nearest one that was measured."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def lines(rows: Iterable[Row]) -> str:
    """Return a JSON object a line, with its marks."""
    return "".join(json.dumps({**asdict(row), "share": row.share, "marks": marks(row)}) + "\n" for row in rows)


def timm_csv(rows: Iterable[Row]) -> str:
    """Return the rows that have times under timm's header; what is not counted, infer_macts, is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(TIMM_COLUMNS)
    for row in rows:
        if row.p50 is not None:
            name = f"{row.model}+{row.strategy}+{row.mode}+{row.precision}"
            writer.writerow([
                name, row.image, round(row.batch / row.p50, 2), round(1000 * row.p50, 3), row.batch,
                round(row.parameters / 1e6, 2), round(row.macs / 1e9, 2), "",
            ])  # fmt: skip
    return file.getvalue()
