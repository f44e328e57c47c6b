"""Shares of a run for machines that know nothing of each other."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from sparsebench.errors import UserError

MOST = 10**6


@dataclass(frozen=True)
class Shard:
    """One of several shares of the cells, by their ids alone: disjoint, and all of them together are all cells.

    Attributes:
        index: from 0.
        number: of shares.
    """

    index: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard of a text such as 0/4.

        Raises:
            UserError: it is no such text, or there is no such share.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip(), re.ASCII)
        if match is None or not int(match[1]) < int(match[2]) <= MOST:
            raise UserError("--shard", got=f"'{text}'", allowed="I/N with I from 0 to N - 1, as 0/4, 1/4, 2/4 and 3/4")
        return cls(int(match[1]), int(match[2]))

    def has(self, cell_id: str) -> bool:
        """Say whether a cell is in it."""
        return int.from_bytes(hashlib.sha256(cell_id.encode()).digest()) % self.number == self.index
