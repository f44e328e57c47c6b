"""What strategies lack of what the others of a setting have, so that they are not ranked, and what completes them."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from sparsebench.board.entries import DENSE, PRETRAINING, Key, Setting, add_titles, asked_of, line_of
from sparsebench.planning import suite as suites
from sparsebench.records import manifests
from sparsebench.records.cell import PRETRAINED, digest
from sparsebench.records.manifests import OWN, Asked
from sparsebench.text import few

SHOWN = 5
"""Networks of a line that are named."""
AMOUNTS = {"macs": r"macs (\S+)", "keep": r"keep (\S+)", "ratio": r"ratio (\S+) a block", "per_block": r"(\S+) a block",
           "counts": r"counts (\S+)"}  # fmt: skip
"""How the label of a budget begins, by the word that asks for it."""
OPTIONS = ("macs", "keep")
"""Those of these words that are options of a run; the others are parameters of a strategy."""


class Cell(NamedTuple):
    """One cell of a strategy at a budget; `draw` numbers those on a network that is tested as it is, else it is 0."""

    n_train: int
    seed: int
    draw: int = 0


@dataclass(frozen=True)
class Lack:
    """What a strategy lacks at one budget, or of its budgets.

    Attributes:
        cells: those of most others that have no record, sorted.
        budgets: the shares of dense MACs of most others at which it was not run.
    """

    cells: tuple[Cell, ...]
    budgets: tuple[float, ...]


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
        cells = tuple(sorted(cell for cell in wanted - every[key] if key in drawing or not cell.draw))
        has = run.get(line_of(key, entry), budgets)
        lacks[key] = Lack(cells, tuple(budget for budget in budgets if budget not in has))
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


def notes(settings: Sequence[Setting], folder: Path | None = None) -> list[str]:
    """Return a line for the strategies of each setting that lack the same, with the command that completes them.

    Args:
        settings: of a board.
        folder: the run's, which says what was asked for, and how files of networks are called.
    """
    asked = [] if folder is None else manifests.suites(folder)
    files = {} if folder is None else manifests.file_names(folder)
    titles = [one.task for one in add_titles(settings)]
    return [line for one, title in zip(settings, titles, strict=True) for line in _notes(one, title, asked, files)]


def file_of(network: str, files: Mapping[str, str]) -> str:
    """Return what people call a network that is tested as it is: the file of its weights, and which of these."""
    name, _, key = network.partition(" ")
    return f"{files.get(name, name)} {key}".strip()


def _notes(setting: Setting, title: str, asked: Sequence[Asked], files: Mapping[str, str]) -> Iterator[str]:
    missing = missing_of(setting)
    if missing.dense and any(key[0] == DENSE for key in setting.others):
        yield f"{title}: dense has no result, so nothing is ranked"
    elif missing.dense:
        command = _command(setting, [DENSE], [], missing.wanted, missing.wanted, asked, files)
        yield f"{title}: dense is missing, so nothing is ranked; {command}"
    by_strategy: dict[str, dict[Key, Lack]] = defaultdict(dict)
    for key, lack in missing.lacks.items():
        by_strategy[key[0]][key] = lack
    alike: dict[tuple[str, tuple[str, ...], frozenset[Cell]], list[str]] = defaultdict(list)
    for strategy, lacks in by_strategy.items():
        without = {key: lack.cells for key, lack in lacks.items() if lack.cells}
        cells = frozenset(cell for of_key in without.values() for cell in of_key)
        shares = sorted({budget for lack in lacks.values() for budget in lack.budgets}, reverse=True)
        what = [f"macs {share:g}" for share in shares]
        if cells:
            every = len(without) == sum(key[0] == strategy for key in setting.entries)
            what.append(
                _what(setting, cells, missing, files) + ("" if every else f" at {_join(k[2] for k in without)}")
            )
        budgets = tuple(dict.fromkeys([*map(_of_share, shares), *(_budget(key, setting) for key in without)]))
        alike[_join(what), budgets, missing.wanted if shares else cells].append(strategy)
    for (text, budgets, cells), strategies in alike.items():
        command = _command(setting, strategies, budgets, cells, missing.wanted, asked, files)
        yield f"{_join(strategies)} on {title}: not ranked there, without {text}; {command}"


def _join(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _of_share(share: float) -> str:
    """Return the label of a budget with all digits of its share of dense MACs."""
    return f"macs {share!r}"


def _budget(key: Key, setting: Setting) -> str:
    """Return the label of an entry's budget; "" of dense, which has no other."""
    share = asked_of(setting.entries[key])
    return "" if key[0] == DENSE else key[2] if math.isnan(share) else _of_share(share)


def _what(setting: Setting, cells: Collection[Cell], missing: Missing, files: Mapping[str, str]) -> str:
    """Return which cells are missing, of all networks, draws, repetitions or trials."""
    wanted = missing.wanted
    if len({cell.n_train for cell in wanted}) > 1:
        return f"{len(cells)} of {len(wanted)} trials"
    if not setting.networks:
        return f"{len(cells)} of {len(wanted)} repetitions ({_ranges(cell.seed for cell in cells)})"
    networks = sorted({cell.seed for cell in cells if not cell.draw})
    draws = [cell for cell in cells if cell.seed not in networks]
    parts = [f"{len(draws)} of {sum(cell.seed not in networks for cell in wanted)} draws"] if draws else []
    if networks:
        names = few([file_of(setting.networks[seed], files) for seed in networks], SHOWN)
        parts.append(f"{len(networks)} of {len({cell.seed for cell in wanted})} networks ({names})")
    return " and ".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as in 0, 2 to 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return _join(f"{run[0]} to {run[-1]}" if len(run) > 2 else _join(map(str, run)) for run in runs)


def _command(
    setting: Setting, strategies: Sequence[str], budgets: Sequence[str], cells: Collection[Cell],
    wanted: Collection[Cell], asked: Sequence[Asked], files: Mapping[str, str],
) -> str:  # fmt: skip
    """Return the clause that says which command runs what is missing, as far as a folder of records knows it.

    Args:
        setting: of the cells.
        strategies: labels.
        budgets: labels.
        cells: that are missing; `wanted` those that most strategies have.
        asked: the suites of the run's folder.
        files: names of files, by those that cells have for them.
    """
    suite = next((one for one in asked if _asks(one, setting, wanted)), asked[0] if len(asked) == 1 else None)
    name = "" if suite is None else suite.name
    if name == OWN:  # of the same task in a suite that trains for it, too little is known
        every = suites.names() if setting.networks else ()
        name = next((one for one in every if any(task.name == setting.task for task in suites.load(one).task)), "")
    if not name:
        return "the command of the run, given again, runs what is missing"
    amounts: dict[str, list[str]] = defaultdict(list)
    for label in budgets:
        word, found = next(((w, m[1]) for w, form in AMOUNTS.items() if (m := re.match(form, label))), ("", ""))
        amounts[word].append(found.replace(",", "+") if word == "counts" else found)
    own = [f"{word}={','.join(values)}" for word, values in amounts.items() if word and word not in OPTIONS]
    words = [_words(strategy, setting, own) for strategy in strategies]
    words += ["--suite", name if name in suites.names() else f"{name}.toml", "--task", _task(setting)]
    for word in OPTIONS:
        words += [f"--{word}", ",".join(amounts[word])] if amounts[word] else []
    words += ["--seeds", str(1 + max(cell.draw if setting.networks else cell.seed for cell in wanted))]
    if networks := [setting.networks[seed] for seed in sorted({cell.seed for cell in cells} & set(setting.networks))]:
        words += ["--model", f"{setting.model}:{setting.params[1].get('arch', '')}".rstrip(":")]
        words += ["--images", "folder:DIR"]
        keys = {network.partition(" ")[2] for network in networks} - {""}
        words += [word for key in sorted(keys) for word in ("--weights-key", key)]
        for file in dict.fromkeys(network.partition(" ")[0] for network in networks):
            words += ["--pretrained"] if file == PRETRAINED else ["--weights", file_of(file, files)]
    return f"`sparsebench run {shlex.join(words)}` with this folder as --out, and the run's other options, runs it"


def _words(label: str, setting: Setting, budget: Sequence[str]) -> str:
    """Return how a strategy is named in a command, with parameters of its budget."""
    entry = next((one for key, one in setting.entries.items() if key[0] == label), None)
    found = re.fullmatch(r"(.*?)(?:\((.*)\))?", label)
    name, params = (label, None) if found is None else found.groups()
    plugin = "" if entry is None else str(entry.column("plugin")[0])
    name = plugin.removeprefix("file:") if plugin.startswith("file:") else name
    given = [*([params.replace(", ", ",")] if params else []), *budget]
    return name + (f":{','.join(given)}" if given else "")


def _task(setting: Setting) -> str:
    """Return how a task is named in a command: with its parameters where no suite says them, as users cut pictures."""
    params = setting.params[0] if setting.networks else {}
    if params.get("classes"):
        params = params | {"classes": "FILE", "labels": ""}
    said = [f"{name}={value}" for name, value in params.items() if value and name not in ("images", "head")]
    return setting.task + (f":{','.join(said)}" if said else "")


def _asks(suite: Asked, setting: Setting, wanted: Collection[Cell]) -> bool:
    """Say whether a suite asked for some cell of a setting, see `manifests.setting_of`."""
    try:
        task, model = json.loads(setting.setting)[:2]
        for cell in wanted:
            about = {"task": task, "model": model, "n_train": cell.n_train, "repetition": cell.seed}
            if setting.networks:
                name, _, key = setting.networks[cell.seed].partition(" ")
                loaded = (
                    {PRETRAINED: True, "weights": ""} if name == PRETRAINED else {PRETRAINED: False, "weights": name}
                )
                params = model["params"] | loaded | ({"weights_key": key} if key else {})
                about |= {"model": model | {"params": params}, "repetition": cell.draw}
            if digest(about) in suite.settings:
                return True
    except (ValueError, TypeError, KeyError):  # the folder may be a stranger's
        pass
    return False
