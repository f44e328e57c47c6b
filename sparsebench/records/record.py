"""A record: what one cell produced. Everything downstream is computed from records alone."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from sparsebench.records.cell import Cell, Whole
from sparsebench.records.origin import Origin
from sparsebench.strategy import Kind

READS, SCHEMA = (3, 4), 4
"""Versions of a record that are read, and the one that is written. 3 has a hash of its source as revision."""
Status = Literal["ok", "failed", "oom", "timeout", "crashed", "unsupported", "skipped"]
ANSWERS: tuple[Status, ...] = ("ok", "unsupported")
"""Statuses of cells that are not run again unless all are."""


MOST_ITEMS = 200_000
"""Test items of a cell."""
MOST_METRICS = 10_000
"""Metrics and series of a record."""


Real = Annotated[float, Field(ge=-1e75, le=1e75)]
"""A number whose fourth power is one too, as of variances of squares."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Metric(_Model):
    """One measured number; None where there is nothing to measure.

    Attributes:
        unit: "fraction", "MACs", "images/s", "loss", "steps", ...
        n: the number of things it was measured on.
        low, high, method: an interval, and how it was made.
    """

    value: Real | None
    unit: str
    n: Whole
    low: Real | None = None
    high: Real | None = None
    method: str = ""


class TokenStep(_Model):
    """Patch tokens that entered a block's attention and its MLP, mean over the test samples; see `cost.Step`."""

    tokens_in: float
    tokens_out: float
    early: bool
    scoring: str
    projected: str = ""
    own: float = 0.0
    spread: float = 0.0
    rested: float = 0.0

    @model_serializer(mode="wrap")
    def _without_rested(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what came later where it is not used, so that records from before it are spelled as ever."""
        fields: dict[str, Any] = dump(self)
        return fields if self.rested else {key: value for key, value in fields.items() if key != "rested"}


class Failure(_Model):
    """Why a cell has no metrics."""

    reason: str
    kind: str = ""
    traceback: str = ""


class Outcomes(_Model):
    """What came out for each of n test items, packed; see `measure.scores.Items`.

    Numbers are zlib-compressed 16-bit integers in base 64. `foreground` is "" where items show none, and where a source
    has more pictures than 16 bits can number.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # earlier versions had losses here

    n: int = Field(ge=0, le=MOST_ITEMS)
    predicted: str
    label: str
    group: str
    rank: str
    foreground: str

    def check(self) -> None:
        """Raise ValueError unless what boards read can be unpacked; what many records share is looked at once."""
        _bytes_of(self.predicted, self.n)
        for text in (self.label, *filter(None, (self.group, self.foreground))):
            _check(text, self.n)


class Head(NamedTuple):
    """What a run must know of a record that is there; the attributes are the record's, see there.

    Attributes:
        setting: what for the most part decides how long its cell takes, see `table.setting_of`.
    """

    cell_id: str
    status: Status
    notes: Mapping[str, str]
    origin: Origin
    started: str
    setting: str
    n_train: int
    seconds: float
    memory: int


class Record(_Model):
    """What one cell produced.

    Attributes:
        notes: facts that are no numbers, such as which attention a strategy was given.
        started: UTC, in ISO 8601. Of two records of a cell the one that came later says so here, whatever the clocks.
        trajectory: realised token counts, block by block.
        samples: series of numbers by name: raw timings in seconds a batch, what was watched while training, selection
            quality by block; None where there is nothing to measure.
        environment: hash of the machine and library description beside the records.
        label: the strategy's name, with the parameters that are not its defaults.
        seconds: wall time; as `started` it belongs to the run and not to the cell.
        memory: the most bytes that the worker process had meanwhile, 0 if unknown; of the run too.
    """

    schema_version: int = SCHEMA
    cell: Cell
    cell_id: str
    status: Status
    metrics: dict[str, Metric] = Field(default_factory=dict, max_length=MOST_METRICS)
    trajectory: tuple[TokenStep, ...] = ()
    samples: dict[str, tuple[float | None, ...]] = Field(default_factory=dict, max_length=MOST_METRICS)
    outcomes: Outcomes | None = None
    notes: dict[str, str] = Field(default_factory=dict)
    failure: Failure | None = None
    origin: Origin
    kind: Kind
    label: str
    environment: str = Field("", pattern=r"^[\w-]{0,64}$")
    device: str = ""
    started: str = ""
    seconds: Real = 0.0
    memory: Whole = 0

    @field_validator("schema_version")
    @classmethod
    def _check_version(cls, version: int) -> int:
        if version not in READS:
            raise ValueError(f"{version}, this sparsebench reads {READS[0]} to {READS[-1]}")
        return SCHEMA


def pack(numbers: np.ndarray) -> str:
    """Return (n,) numbers from 0 to 65535 as a short text; ValueError for any other."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < 2**16):
        raise ValueError("outcomes must lie in 0..65535")
    return base64.b64encode(zlib.compress(numbers.astype("<u2").tobytes(), 9)).decode()


def pack_foregrounds(numbers: np.ndarray | None) -> str:
    """Return (n,) numbers of foregrounds as a short text; "" where there are none, or one is above 65535."""
    return "" if numbers is None or numbers.max(initial=0) >= 2**16 else pack(numbers)


def unpack(text: str, n: int) -> np.ndarray:
    """Return the (n,) numbers of a packed text; ValueError if there are more or fewer."""
    return np.frombuffer(_bytes_of(text, n), "<u2").astype(np.int64)


def _bytes_of(text: str, n: int) -> bytes:
    try:
        bounded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 2 * n + 1)
    except zlib.error as error:
        raise ValueError(f"packed outcomes are corrupt ({error})") from error
    if len(bounded) != 2 * n:
        raise ValueError(f"packed outcomes do not hold {n} numbers")
    return bounded


@lru_cache(maxsize=256)
def _check(text: str, n: int) -> None:
    _bytes_of(text, n)
