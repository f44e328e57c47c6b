"""The ledger: what a source says of one method on one model, and where it says so."""

from __future__ import annotations

import tomllib
from collections import Counter
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sparsebench.errors import UserError, unknown

MOST = 10**9


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("must be a number")
    return value


Positive = Annotated[Decimal, Field(gt=0, le=MOST), BeforeValidator(_number)]


class Claim(BaseModel):
    """One row of the ledger.

    Attributes:
        id: what users type.
        paper: where the method was published; for a comparison, where the comparison was.
        method: its name there.
        model: as users type it after --model.
        canvas: side of the images in pixels; 0 for the model's own.
        plugin: as users type it after --plugin; "" where the strategy is not here or the settings are not known.
        counts, blocks: token counts that the source states, and the blocks after whose attention they are left.
        weights: whether the network was trained with the method.
        gmacs, dense_gmacs: 10^9 of what the source counts, with and without the method.
        top1: accuracy on ImageNet-1k in percent.
        speed, dense_speed: images/s.
        speedup: where the source has that alone.
        hardware: what the speed was measured on.
        source: where the numbers were read.
        note: what to know of the settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[\w.-]+$")
    paper: str = Field(min_length=1)
    method: str = Field(min_length=1)
    model: str = Field(pattern=r"^timm:.")
    canvas: int = Field(0, ge=0)
    plugin: str = ""
    counts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    weights: Literal["off the shelf", "trained"]
    gmacs: Positive | None = None
    dense_gmacs: Positive | None = None
    top1: Annotated[Positive, Field(le=100)] | None = None
    speed: Positive | None = None
    dense_speed: Positive | None = None
    speedup: Positive | None = None
    hardware: str = ""
    source: str = Field(min_length=1)
    note: str = ""

    @model_validator(mode="after")
    def _counts_have_blocks(self) -> Claim:
        if len(self.counts) != len(self.blocks):
            raise ValueError(f"{len(self.counts)} counts for {len(self.blocks)} blocks")
        return self

    @property
    def claimed_speedup(self) -> float | None:
        """By how much the source says that it is faster than the dense network."""
        if self.speedup is not None:
            return float(self.speedup)
        return float(self.speed / self.dense_speed) if self.speed and self.dense_speed else None


def load(path: Path | None = None) -> list[Claim]:
    """Return the rows of a TOML file with [[claim]] tables, or of the ledger that comes with sparsebench.

    Raises:
        UserError: the file cannot be read, or a row lacks a field, has a wrong or unknown one, or another's id.
    """
    place = resources.files(__package__) / "claims.toml" if path is None else path
    name = "claims.toml" if path is None else str(path)
    try:
        tables = tomllib.loads(place.read_bytes().decode("utf-8"), parse_float=Decimal)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{name} cannot be read as TOML: {error}") from error
    listed = tables.get("claim")
    if set(tables) != {"claim"} or not isinstance(listed, list) or not listed:
        raise UserError(f"{name} is no ledger", got=sorted(tables), allowed="[[claim]] tables, and nothing else")
    claims = [_claim(table, number, name) for number, table in enumerate(listed, 1)]
    twice = [id for id, n in Counter(claim.id for claim in claims).items() if n > 1]
    if twice:
        raise UserError(f"rows of {name} with the same id", got=twice)
    return claims


def find(claims: list[Claim], id: str) -> Claim:
    """Return the row with that id.

    Raises:
        UserError: there is none.
    """
    by_id = {claim.id: claim for claim in claims}
    if id not in by_id:
        raise unknown("row of the ledger", id, by_id)
    return by_id[id]


def _claim(table: Any, number: int, name: str) -> Claim:
    try:
        return Claim.model_validate(table)
    except ValidationError as error:
        called = table.get("id", f"number {number}") if isinstance(table, dict) else f"number {number}"
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise UserError(f"{name}, row {called}: {field}: {first['msg']}") from error
