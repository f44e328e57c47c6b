"""Budgets, as users and suites write them; `sparsebench.measure.schedule` turns them into token counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from sparsebench.errors import UserError

Schedule = Literal["stages", "every", "late"]
AUTO: Literal["auto"] = "auto"
"""The schedule of a budget that is chosen on the network, see `sparsebench.training.schedules`."""
Convention = Literal["power-floor", "compound-ceil"]
AMOUNTS = {
    "macs": "macs {}",
    "keep_rate": "keep {}",
    "per_block": "{} a block",
    "ratio": "ratio {} a block",
    "counts": "counts {}",
}
"""The fields that set the amount, each with the form of the amount in a label."""
ANY_SITE = ("macs", "keep_rate")
"""Amounts that every strategy can have, at every site."""
FRACTIONS = {
    "macs": "fraction of MACs",
    "keep_rate": "keep rate",
    "ratio": "share of its tokens that a block keeps (ratio)",
}
"""Amounts in (0, 1], each with its name in errors."""
LATER: dict[str, Any] = {"per_block": None, "ratio": None, "counts": None, "schedule": None, "gamma": 2.0}
"""Fields that budgets in older records lack, with the values that these budgets imply."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class Budget(BaseModel):
    """The limit on the cost of a strategy: one of five amounts, and how it is spread over the blocks.

    Attributes:
        macs: target fraction of the dense MACs, in (0, 1].
        keep_rate: share of the tokens that stays, in (0, 1]: at each stage, or, if tokens leave in every block, after
            the last block.
        per_block: tokens that leave in each block, r of ToMe (Bolya et al. 2023): a number, or "FIRST..LAST" for a
            number that changes linearly from the first block to the last, rounded down.
        ratio: share of its tokens that stays in each block, in (0, 1]; N - floor(N - ratio N) stay (Tran et al. 2024).
        counts: tokens that remain after each of `blocks`; without `blocks`, after each block of the network, or of the
            part of it in which the strategy acts.
        convention: how a keep rate r becomes the count K_s of stage s: "power-floor" floor(r^s N)
            (DynamicViT, Rao et al. 2021) or "compound-ceil" ceil(r K_(s-1)) (EViT, Liang et al. 2022).
        schedule: "stages": tokens leave in some blocks, the same share in each; "every": in every block, the same
            number in each; "late": in every block, in proportion to (l / L)^gamma in block l of L; "auto": chosen among
            schedules with the same MACs, by the distance of the outputs from those of the dense network. None: the
            schedule of the strategy.
        gamma: exponent of the late schedule.
        blocks: the blocks, from 0, in which tokens leave, with any schedule. Without it they leave in every block, or,
            in stages, after each quarter of the network; a strategy may begin later, see `Strategy.first`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    macs: float | None = None
    keep_rate: float | None = None
    per_block: int | str | None = None
    ratio: float | None = None
    counts: tuple[int, ...] | None = None
    convention: Convention = "power-floor"
    schedule: Schedule | Literal["auto"] | None = None
    gamma: float = Field(2.0, ge=0)
    blocks: tuple[int, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        amounts = {key: data[key] for key in AMOUNTS if data.get(key) is not None}
        if len(amounts) != 1:
            got = ", ".join(f"{key}={value}" for key, value in amounts.items()) or "none"
            raise UserError("a budget is one amount", got=got, allowed="one of " + ", ".join(AMOUNTS))
        ((key, value),) = amounts.items()
        if key == "per_block":
            _check_per_block(value)
        if data.get("schedule") == AUTO:
            _check_auto(key, data)
        if key not in ANY_SITE:
            _check_schedule(key, data)
        if key in ("per_block", "counts"):
            return data
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise UserError(FRACTIONS[key], got=value, allowed="(0, 1]")
        return data | {key: float(value)}

    @model_validator(mode="after")
    def _check_lists(self) -> Budget:
        counts, blocks = self.counts, self.blocks
        if counts is not None and not _are_falling(counts):
            raise UserError(
                "token counts (counts)",
                got="+".join(map(str, counts)) or "none",
                allowed="1 or more each, never more than before",
            )
        if blocks is not None and not _are_rising(blocks):
            raise UserError(
                "budget blocks", got="+".join(map(str, blocks)) or "none", allowed="rising numbers from 0, none twice"
            )
        if counts is not None and blocks is not None and len(counts) != len(blocks):
            raise UserError(
                "counts and blocks of a budget",
                got=f"{len(counts)} counts for {len(blocks)} blocks",
                allowed="one count a block",
            )
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer fields that are not used, so that the hashes of older cells stay the same."""
        fields: dict[str, Any] = dump(self)
        return {key: value for key, value in fields.items() if key not in LATER or value != LATER[key]}

    @property
    def amount(self) -> str:
        """The field that sets the amount, one of AMOUNTS."""
        return next(name for name in AMOUNTS if getattr(self, name) is not None)

    @property
    def value(self) -> str:
        """The value of the amount, as in the label."""
        value = getattr(self, self.amount)
        if self.amount == "counts":
            return ",".join(map(str, value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def rounding(self) -> str:
        """The convention of rounding, as in the label; "" if the label has none."""
        is_named = self.amount == "keep_rate" or (self.amount == "macs" and self.convention != "power-floor")
        return self.convention if is_named else ""

    @property
    def places(self) -> str:
        """The blocks and the schedule, as in the label; "" if both are the strategy's."""
        words = []
        if self.blocks is not None:
            words.append("@" + ",".join(map(str, self.blocks)))
        if self.schedule == "stages":
            words.append("in stages")
        elif self.schedule == "every":
            words.append("every block")
        elif self.schedule == "late":
            words.append(f"late {self.gamma:g}")
        elif self.schedule == AUTO:
            words.append(AUTO)
        return " ".join(words)

    @property
    def label(self) -> str:
        """The name of the budget in tables."""
        amount = AMOUNTS[self.amount].format(self.value)
        return " ".join(filter(None, (amount, self.rounding, self.places)))


def _are_falling(counts: Sequence[int]) -> bool:
    """Return whether there are counts, each 1 or more and none above the one before."""
    return bool(counts) and min(counts) >= 1 and all(a >= b for a, b in pairwise(counts))


def _are_rising(blocks: Sequence[int]) -> bool:
    """Return whether there are blocks, each 0 or more and above the one before."""
    return bool(blocks) and min(blocks) >= 0 and all(a < b for a, b in pairwise(blocks))


def _check_per_block(value: Any) -> None:
    """Raise UserError if `per_block` is neither a number nor FIRST..LAST."""
    ends = _RANGE.fullmatch(value) if isinstance(value, str) else None
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not number and (ends is None or not any(int(end) for end in ends.groups())):
        raise UserError("tokens that leave each block (per_block)", got=value, allowed="1 or more, or such as 26..0")


def _check_auto(key: str, data: dict[str, Any]) -> None:
    """Raise UserError if a budget that leaves the schedule open also states a part of it, or no share of the MACs."""
    if key != "macs":
        raise UserError(
            "schedule=auto compares schedules with the same MACs",
            got=f"{key}={data[key]}",
            allowed="a share of the MACs, as in macs=0.5",
        )
    stated = [name for name in ("blocks", "gamma") if data.get(name) is not None]
    if stated:
        raise UserError(f"schedule=auto chooses the blocks; leave out {' and '.join(stated)}, or schedule")


def _check_schedule(key: str, data: dict[str, Any]) -> None:
    """Raise UserError for a schedule that an amount contradicts by setting how many tokens leave in each block."""
    allowed = {"per_block": ("every", "stages"), "ratio": ("every",), "counts": ()}[key]
    if (schedule := data.get("schedule")) is not None and schedule not in allowed:
        raise UserError(
            f"{key} says how many tokens leave each block, and schedule={schedule} contradicts it",
            allowed=f"schedule={' or '.join(allowed)}" if allowed else f"{key} without a schedule",
            next_step="name the blocks with blocks=3+6+9, or leave the schedule out",
        )


FULL = Budget(macs=1.0)
