"""A record: what one cell produced. Everything downstream is computed from records alone."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from sparsebench.records.cell import Cell, Part, Where, Whole
from sparsebench.records.origin import Origin
from sparsebench.strategy import Kind

Raw = dict[str, Any]


def _with_ranks(raw: Raw) -> Raw:
    """Schema 1 did not say what rank the own class had, nor the loss."""
    outcomes = raw.get("outcomes")
    return raw | {"outcomes": outcomes | {"rank": "", "loss": ""}} if isinstance(outcomes, dict) else raw


def _with_foregrounds(raw: Raw) -> Raw:
    """Schema 2 did not say which foreground an item shows."""
    outcomes = raw.get("outcomes")
    return raw | {"outcomes": outcomes | {"foreground": ""}} if isinstance(outcomes, dict) else raw


def _with_revision(raw: Raw) -> Raw:
    """Schema 3 told strategies apart by the hashes of their sources."""
    origin = raw.get("origin")
    if not isinstance(origin, dict) or "sha256" not in origin:
        return raw
    named = {key: value for key, value in origin.items() if key != "sha256"}
    return raw | {"origin": named | {"revision": origin["sha256"]}}


UPGRADES: tuple[Callable[[Raw], Raw], ...] = (_with_ranks, _with_foregrounds, _with_revision)
"""The function at i makes a raw record of schema i + 1 one of schema i + 2; a field more or less is a schema more."""
SCHEMA = 1 + len(UPGRADES)
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

    Numbers are zlib-compressed 16-bit integers in base 64, losses 32-bit floating-point numbers. `rank` and `loss` are
    "" in what schema 1 had, `foreground` in what schema 2 had, where items show none, and where a source has more
    pictures than 16 bits can number.
    """

    n: int = Field(ge=0, le=MOST_ITEMS)
    predicted: str
    label: str
    group: str
    rank: str
    loss: str
    foreground: str

    def check(self) -> None:
        """Raise ValueError unless what boards read can be unpacked; what many records share is looked at once."""
        _bytes_of(self.predicted, self.n)
        for text in (self.label, *filter(None, (self.group, self.foreground))):
            _check(text, self.n)


class Head(_Model):
    """What a resumed run must know of a record; the rest of its line is checked to be JSON and is not read.

    Attributes:
        notes: facts that are no numbers, such as which attention a strategy was given.
        started: UTC, in ISO 8601. Of two records of a cell the one that came later says so here, whatever the clocks.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    schema_version: int = SCHEMA
    cell_id: str
    status: Status
    notes: dict[str, str] = Field(default_factory=dict)
    origin: Origin
    started: str = ""


class Setting(_Model):
    """What of a cell decides, for the most part, how long it takes."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    task: Part
    model: Part
    n_train: Whole
    where: Where = "both"


class Past(Head):
    """What is to be known of a record to tell how long others like it will take; see `Record`."""

    cell: Setting
    seconds: Real = 0.0
    memory: Whole = 0


class Record(Head):
    """What one cell produced.

    Attributes:
        trajectory: realised token counts, block by block.
        samples: series of numbers by name: raw timings in seconds a batch, what was watched while training, selection
            quality by block; None where there is nothing to measure.
        environment: hash of the machine and library description beside the records.
        label: the strategy's name, with the parameters that are not its defaults.
        seconds: wall time; as `started` it belongs to the run and not to the cell.
        memory: the most bytes that the worker process had meanwhile, 0 if unknown; of the run too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cell: Cell
    metrics: dict[str, Metric] = Field(default_factory=dict, max_length=MOST_METRICS)
    trajectory: tuple[TokenStep, ...] = ()
    samples: dict[str, tuple[float | None, ...]] = Field(default_factory=dict, max_length=MOST_METRICS)
    outcomes: Outcomes | None = None
    failure: Failure | None = None
    kind: Kind
    label: str
    environment: str = Field("", pattern=r"^[\w-]{0,64}$")
    device: str = ""
    seconds: Real = 0.0
    memory: Whole = 0


class NewerSchemaError(ValueError):
    """A record was written by a later sparsebench than this one."""


def upgrade(raw: object) -> Raw:
    """Return a raw record as one of this schema; it has its own version or is an older one.

    Raises:
        NewerSchemaError: its schema is newer.
        ValueError: it has none.
    """
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"schema version {version!r}, this sparsebench reads 1 to {SCHEMA}")
    if version > SCHEMA:
        raise NewerSchemaError(f"schema version {version}, this sparsebench reads up to {SCHEMA}")
    for step in UPGRADES[version - 1 :]:
        raw = step(raw)
    return raw | {"schema_version": SCHEMA}


def pack(numbers: np.ndarray) -> str:
    """Return (n,) numbers from 0 to 65535 as a short text; ValueError for any other."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < 2**16):
        raise ValueError("outcomes must lie in 0..65535")
    return _pack(numbers.astype("<u2"))


def pack_foregrounds(numbers: np.ndarray | None) -> str:
    """Return (n,) numbers of foregrounds as a short text; "" where there are none, or one is above 65535."""
    return "" if numbers is None or numbers.max(initial=0) >= 2**16 else pack(numbers)


def pack_reals(numbers: np.ndarray) -> str:
    """Return (n,) numbers in single precision as a short text; ValueError for any that is not finite."""
    if not np.isfinite(numbers).all():
        raise ValueError("losses must be finite")
    return _pack(numbers.astype("<f4"))


def _pack(numbers: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def unpack(text: str, n: int) -> np.ndarray:
    """Return the (n,) numbers of a packed text; ValueError if there are more or fewer."""
    return _unpack(text, n, "<u2").astype(np.int64)


def unpack_reals(text: str, n: int) -> np.ndarray:
    """Return the (n,) numbers in single precision of a packed text; ValueError if there are more or fewer."""
    return _unpack(text, n, "<f4")


def _unpack(text: str, n: int, kind: str) -> np.ndarray:
    return np.frombuffer(_bytes_of(text, n, np.dtype(kind).itemsize), kind)


def _bytes_of(text: str, n: int, each: int = 2) -> bytes:
    size = n * each
    try:
        bounded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"packed outcomes are corrupt ({error})") from error
    if len(bounded) != size:
        raise ValueError(f"packed outcomes do not hold {n} numbers")
    return bounded


@lru_cache(maxsize=256)
def _check(text: str, n: int) -> None:
    _bytes_of(text, n)
