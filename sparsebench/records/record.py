"""A record: what one cell produced. Everything downstream is computed from records alone."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, ValidationInfo, field_serializer, field_validator

from sparsebench.errors import UserError
from sparsebench.measure.cost import Step
from sparsebench.records.cell import Cell, Origin, Value, Whole
from sparsebench.strategy.base import Kind

OLDEST, SCHEMA = 3, 4
"""Versions of a record: the first that is read, which has a hash of its source as revision, and the one written."""
Status = Literal["ok", "failed", "oom", "timeout", "crashed", "unsupported", "skipped"]
ANSWERS: tuple[Status, ...] = ("ok", "unsupported")
"""Statuses of cells that are not run again unless all are."""
MOST_ITEMS = 200_000
"""Test items of a cell."""
Real = Annotated[float, Field(ge=-1e75, le=1e75)]
"""A number whose fourth power is one too, as of variances of squares."""


class VersionError(UserError):
    """A record is of a version that is not read."""


class Metric(Value):
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


class Failure(Value):
    """Why a cell has no metrics."""

    reason: str
    kind: str = ""
    traceback: str = ""


class Outcomes(Value):
    """What came out for each of n test items, as bytes, see `bytes_of` and `measure.scores.Items`.

    In JSON they are zlib-compressed 16-bit integers in base 64. `foreground` is empty where items show none, and where
    a source has more pictures than 16 bits can number.
    """

    model_config = ConfigDict(extra="ignore")  # earlier versions had losses here

    n: int = Field(ge=0, le=MOST_ITEMS)
    predicted: bytes
    label: bytes
    group: bytes
    rank: bytes
    foreground: bytes

    @field_validator("predicted", "label", "group", "rank", "foreground", mode="before")
    @classmethod
    def _unpack(cls, content: Any, info: ValidationInfo) -> Any:
        if isinstance(content, str):
            try:
                numbers = zlib.decompressobj().decompress(base64.b64decode(content, validate=True), 2 * MOST_ITEMS + 2)
            except zlib.error as error:
                raise ValueError(f"packed outcomes are corrupt ({error})") from error
            content = bytes_of(np.frombuffer(numbers, "<u2"))
        n, may_lack = info.data.get("n", 0), info.field_name not in ("predicted", "label")
        if isinstance(content, bytes) and len(content) not in (n, 2 * n) and (content or not may_lack):
            raise ValueError(f"{len(content)} bytes for {n} test items")
        return content

    @field_serializer("predicted", "label", "group", "rank", "foreground", when_used="json")
    def _pack(self, content: bytes) -> str:
        numbers = numbers_of(content, self.n).astype("<u2").tobytes()
        return base64.b64encode(zlib.compress(numbers)).decode() if content else ""


def numbers_of(content: bytes, n: int) -> np.ndarray:
    """Return the (n,) whole numbers of outcomes: little-endian, of one byte or two each."""
    return np.frombuffer(content, "<u1" if len(content) == n else "<u2").astype(np.int64)


def bytes_of(numbers: np.ndarray | None) -> bytes:
    """Return (n,) whole numbers as `numbers_of` reads them; none where there are none, or one is above 65535."""
    if numbers is None or not numbers.size or numbers.max() >= 2**16:
        return b""
    return numbers.astype("<u1" if numbers.max() < 256 else "<u2").tobytes()


class Head(NamedTuple):
    """What a run must know of a record that is there; the attributes are the record's, see there.

    Attributes:
        setting: what for the most part decides how long its cell takes, see `table.setting_text`.
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


class Record(Value):
    """What one cell produced.

    Attributes:
        notes: facts that are no numbers, such as which attention a strategy was given.
        started: UTC, in ISO 8601. Of two records of a cell the later one is the newer.
        trajectory: realised token counts, block by block, mean over the test samples.
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
    metrics: dict[str, Metric] = Field(default_factory=dict)
    trajectory: tuple[Step, ...] = ()
    samples: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    outcomes: Outcomes | None = None
    notes: dict[str, str] = Field(default_factory=dict)
    failure: Failure | None = None
    origin: Origin
    kind: Kind
    label: str
    environment: str = ""
    device: str = ""
    started: str = ""
    seconds: Real = 0.0
    memory: Whole = 0

    @field_validator("schema_version")
    @classmethod
    def _check_version(cls, version: int) -> int:
        if not OLDEST <= version <= SCHEMA:
            step = "upgrade sparsebench" if version > SCHEMA else "read it with the sparsebench that wrote it"
            raise VersionError(f"a record of version {version}", allowed=f"{OLDEST} to {SCHEMA}", next_step=step)
        return SCHEMA
