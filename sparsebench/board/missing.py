"""What strategies lack of what the others of a setting have, so that they are not ranked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from sparsebench.board.entries import DENSE, PRETRAINING, Key, Setting, asked_of, line_of


class Cell(NamedTuple):
    """One cell of a strategy at a budget; `draw` numbers those on a network that is tested as it is, else it is 0."""

    n_train: int
    seed: int
    draw: int = 0


@dataclass(frozen=True)
class Lack:
    """What a strategy lacks at one budget, or of its budgets.

    Attributes:
        cells: those of most others that have no record.
        budgets: the shares of dense MACs of most others at which it was not run.
    """

    cells: frozenset[Cell]
    budgets: frozenset[float]


@dataclass(frozen=True)
class Missing:
    """What is missing in a setting.

    Attributes:
        dense: whether dense is, by which all others are measured: then nothing is ranked.
        wanted: the cells that most strategies have.
        budgets: falling shares of dense MACs that most strategies were run at, where some were run at several.
        lacks: by strategy, kind and budget, of those that lack something.
        apart: these, and the other points of their curves: a strategy is ranked at all of its budgets or at none.
    """

    dense: bool
    wanted: frozenset[Cell]
    budgets: tuple[float, ...]
    lacks: Mapping[Key, Lack]
    apart: frozenset[Key]

    def unranked(self, setting: Setting, failed: Collection[tuple[str, str]]) -> set[Key]:
        """Return the entries that are not ranked: those that stand apart, and those of which cells failed.

        Args:
            setting: whose missing cells these are.
            failed: strategies and budgets of which cells failed.
        """
        if self.dense:
            return set(setting.entries)
        broken = {strategy for strategy, _ in failed} if self.budgets else set()
        return set(self.apart) | {key for key in setting.entries if key[0] in broken or (key[0], key[2]) in failed}


def missing_of(setting: Setting) -> Missing:
    """Return what strategies lack that at least half of those of a setting have: a seed, a network, a draw, a budget.

    A cell that failed is not missing, nor is one that is unsupported.
    """
    dense = setting.task != PRETRAINING and not any(key[0] == DENSE for key in setting.entries)
    every = {key: _cells(setting, key) for key in setting.entries}
    # What draws nothing is tested once on a network, unless each repetition tests it on other pictures.
    parts = any(len(tests) > 1 for entry in setting.entries.values() if entry.draws for tests in entry.tests.values())
    drawing = {key for key, cells in every.items() if parts or any(cell[2] for cell in cells)}
    counts = Counter(cell for cells in every.values() for cell in cells)
    wanted = frozenset(Cell(*cell) for cell, n in counts.items() if 2 * n >= len(drawing if cell[2] else every))
    budgets, run = _budgets(setting)
    lacks = {}
    for key, entry in setting.entries.items():
        cells = frozenset(cell for cell in wanted - every[key] if key in drawing or not cell.draw)
        has = run.get(line_of(key, entry), set(budgets))
        lacks[key] = Lack(cells, frozenset(budgets) - has)
    lacks = {key: one for key, one in lacks.items() if one.cells or one.budgets}
    lines = {line_of(key, setting.entries[key]) for key in lacks if budgets} - {None}
    apart = frozenset(key for key, entry in setting.entries.items() if key in lacks or line_of(key, entry) in lines)
    return Missing(dense, wanted, budgets, lacks, apart)


def _cells(setting: Setting, key: Key) -> set[tuple[int, int, int]]:
    """Return the cells of an entry that have a record, whatever came of it, as plain tuples: there may be a million."""
    cells = set[tuple[int, int, int]]()
    for entry in (setting.entries[key], setting.others.get(key)):
        if entry is not None:
            draws = entry.repetitions.tolist() if setting.networks else repeat(0, entry.size)
            cells.update(zip(entry.sizes.tolist(), entry.seeds.tolist(), draws, strict=True))
    return cells


def _budgets(setting: Setting) -> tuple[tuple[float, ...], dict[object, set[float]]]:
    """Return the falling budgets of most curves, nothing where none has several; and those that each was run at."""
    run: dict[object, set[float]] = defaultdict(set)
    for key, entry in setting.largest_entries.items():
        if (line := line_of(key, entry)) is not None:
            run[line].add(asked_of(entry))
    if not any(len(asked) > 1 for asked in run.values()):
        return (), {}
    for key, entry in setting.others.items():
        if (line := line_of(key, entry)) in run:
            run[line].add(asked_of(entry))
    counts = Counter(budget for asked in run.values() for budget in asked)
    return tuple(sorted((budget for budget, n in counts.items() if 2 * n >= len(run)), reverse=True)), run
