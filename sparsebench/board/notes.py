"""What a reader of a board must know besides its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsebench.board.build import cautions, failures, other_settings, remarks


def notes_on(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is left out, what failed, what checks found: a line each."""
    more = [
        f"{task}: {n} other setting{'s' if n > 1 else ''} (data, model or size) not shown; see them with --by task"
        for task, n in other_settings(flat).items()
    ]
    return more + cautions(flat) + failures(flat) + remarks(flat)
