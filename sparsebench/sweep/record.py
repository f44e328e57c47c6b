"""A record: what one cell produced. Everything downstream is computed from records alone."""

from __future__ import annotations

import base64
import zlib
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sparsebench.plugin.origin import Origin
from sparsebench.sweep.cell import Cell

SCHEMA = 1
Status = Literal["ok", "failed", "oom", "timeout", "crashed", "unsupported", "skipped"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Metric(_Model):
    """One measured number; None where there is nothing to measure.

    Attributes:
        unit: "fraction", "MACs", "images/s", "loss", "steps", ...
        n: the number of things it was measured on.
        low, high, method: an interval, and how it was made.
    """

    value: float | None
    unit: str
    n: int
    low: float | None = None
    high: float | None = None
    method: str = ""


class TokenStep(_Model):
    """Patch tokens that entered a block's attention and its MLP, mean over the test samples."""

    tokens_in: float
    tokens_out: float
    early: bool
    scoring: str
    projected: str = ""


class Failure(_Model):
    """Why a cell has no metrics."""

    reason: str
    kind: str = ""
    traceback: str = ""


class Outcomes(_Model):
    """What came out for each test item, packed: class numbers as zlib-compressed 16-bit integers in base 64."""

    n: int
    predicted: str
    label: str
    group: str


class Record(_Model):
    """What one cell produced.

    Attributes:
        trajectory: realised token counts, block by block.
        samples: series of numbers by name: raw timings in seconds a batch, what was watched while training, selection
            quality by block; None where there is nothing to measure.
        notes: facts that are no numbers, such as which attention a strategy was given.
        environment: hash of the machine and library description beside the records.
        label: the strategy's name, with the parameters that are not its defaults.
        started, seconds: UTC and wall time; they belong to this run and not to the cell.
        memory: the most bytes that the worker process had meanwhile, 0 if unknown; of this run too.
    """

    schema_version: int = SCHEMA
    cell: Cell
    cell_id: str
    status: Status
    metrics: dict[str, Metric] = Field(default_factory=dict)
    trajectory: tuple[TokenStep, ...] = ()
    samples: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    outcomes: Outcomes | None = None
    notes: dict[str, str] = Field(default_factory=dict)
    failure: Failure | None = None
    origin: Origin
    kind: str
    label: str
    environment: str = ""
    device: str = ""
    started: str = ""
    seconds: float = 0.0
    memory: int = 0


def pack(numbers: np.ndarray) -> str:
    """Return (n,) numbers from 0 to 65535 as a short text; ValueError for any other."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < 2**16):
        raise ValueError("outcomes must lie in 0..65535")
    return base64.b64encode(zlib.compress(numbers.astype("<u2").tobytes(), 9)).decode()


def unpack(text: str, n: int) -> np.ndarray:
    """Return the (n,) numbers of a packed text; ValueError if there are more or fewer."""
    try:
        bounded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 2 * n + 2)
    except zlib.error as error:
        raise ValueError(f"packed outcomes are corrupt ({error})") from error
    if len(bounded) != 2 * n:
        raise ValueError(f"packed outcomes do not hold {n} numbers")
    return np.frombuffer(bounded, "<u2").astype(np.int64)
