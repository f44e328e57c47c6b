"""A run's folder as a board: its records, what is shown of them, and what a reader must know besides the numbers."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote_plus

import numpy as np
import pandas as pd
from scipy.special import bdtr

from sparsebench import files
from sparsebench.board.columns import SPEED_UP
from sparsebench.board.judge import Flats, Leaderboard, judge
from sparsebench.board.settings import (
    BADGE,
    DECLARED,
    DENSE,
    HOW,
    MAIN,
    METRICS,
    NETWORK,
    ON_BACKGROUND,
    ORDER,
    PRETRAINING,
    SUCCESS,
    TRAINED,
    Setting,
    dense_of,
    frame_of,
    settings_of,
)
from sparsebench.errors import few, plain
from sparsebench.publish import MANIFEST
from sparsebench.records import manifests, store, table
from sparsebench.records.record import canonical, numbers_of
from sparsebench.records.table import OUTCOMES
from sparsebench.stats import paired
from sparsebench.strategy import spec
from sparsebench.strategy.base import how_of_label
from sparsebench.tasks.sources.labels import MOST_CLASSES, described
from sparsebench.testing import reports
from sparsebench.testing.reports import CHECKS, REMARK

SURPRISING = 1e-3
"""How improbable so few right answers are by chance before the board says that classes are in another order."""
NAMED = 5
"""Strategies that are named where a speed-up is larger than its MACs explain."""


def notes_on(
    records: Flats, judged: Leaderboard | None = None, folder: Path | None = None, *, technical: bool = True
) -> list[str]:
    """Return what is missing or left out, what differences can be significant, what failed, and what checks found.

    Args:
        records: of a board.
        judged: the board.
        folder: the run's.
        technical: whether detectable differences, unfinished training and inactive terms are wanted.
    """
    frame = frame_of(records)
    every = settings_of(frame) if judged is None else judged.settings
    settings = [one for one in every if one.source != PRETRAINING]
    lines = []
    if folder is not None:
        used, names = " ".join(frame["setting"].astype(str).unique()), manifests.file_names(folder)
        called = ((names.get(name, name), line) for name, line in manifests.left_out(folder))
        lines += [f"{name}: left out: {line}" for name, line in called if canonical(name) in used]
    lines += [
        f"{one.task}: one network: intervals and tests are over its test items alone"
        for one in settings
        if one.lone and not one.has_trials
    ]
    lines += not_ranked(settings, folder)
    for task, n in sorted(Counter(one.source for one in settings).items()):
        if n > 1:
            pictures = {one.params[0].get("images") for one in settings if one.source == task}
            beside = ", and sets of pictures side by side with --view shifts" * (len(pictures) > 1)
            others = f"{n - 1} other setting{'s' * (n > 2)} (data, model, size or track) not shown"
            lines.append(f"{task}: {others}; see them with --by task{beside}")
    lines += below_chance(frame)
    for one in () if judged is None else judged.rankings:
        if SPEED_UP.key in one.every:
            ratio, rows = one.every["macs_ratio"], one.every[["strategy", "budget"]]
            fast = rows[(ratio < 1) & (one.every[SPEED_UP.key] * ratio > 1)]
            if odd := [f"{strategy} ({budget})" for strategy, budget in fast.itertuples(index=False)]:
                lines.append(
                    f"{one.task}: speed-up above dense MACs / MACs (other work can cause it): {few(odd, NAMED)}"
                )
    if technical:
        lines += _technical(frame, judged)
    said = frame.loc[frame["cost_model"] != "", ["task", "model", "strategy", "budget", "cost_model"]]
    for (task, model), rows in said.sort_values([*said]).groupby(["task", "model"], observed=True):
        n, (*_, strategy, budget, why) = rows["strategy"].nunique(), rows.iloc[0]
        lines.append(
            f"{model} on {task}: its cost model does not plan as the network runs, for {n} "
            f"{'strategy' if n == 1 else 'strategies'}, such as {strategy}, {budget}: {why}"
        )
    lines += [*machines(frame), *failures(frame)]
    said = frame[["strategy", REMARK]].drop_duplicates() if REMARK in frame else pd.DataFrame()
    return lines + [
        f"{strategy}: checks: {remark}" for strategy, remark in sorted(said.itertuples(index=False)) if remark
    ]


def _technical(frame: pd.DataFrame, judged: Leaderboard | None) -> Iterator[str]:
    """Yield the differences that can be significant, unfinished training, and published terms that were inactive."""
    for one in judged.rankings if judged is not None else ():
        pairs, what = (one.pairs, "accuracy") if one.curves is None else (one.curves.pairs, "mean accuracy over MACs")
        if (clause := paired.detectable(pairs, what, one.setting.of)) is not None:
            yield f"{one.task}: {clause}"
    good = frame[frame["status"] == "ok"]
    trials = good.loc[good["success"].notna(), "strategy"].value_counts()
    unfitted = good.loc[(good["success"] == 0) & (good["fitted"] == 0), "strategy"].value_counts()
    for strategy, n in sorted(unfitted[unfitted > 0].items()):
        trained = f"{n} of {trials[strategy]} trials reached the step limit"
        yield f"{strategy}: {trained} before they fitted their training samples"
    said = frame[["strategy", "task", "inactive"]].drop_duplicates()
    for strategy, task, note in sorted(said[said["inactive"] != ""].itertuples(index=False)):
        parts = [part.rpartition(": ") for part in note.split("; ")]
        terms = ", ".join(f"{names} ({why})" for names, _, why in parts)
        yield f"{strategy} on {task}: published terms inactive: {terms}"


def not_ranked(settings: Sequence[Setting], folder: Path | None = None) -> list[str]:
    """Return a line for the strategies of each setting of a board that lack the same, with the command that adds it.

    The command is known where the run's folder answers one suite.
    """
    suites = {one.name for one in manifests.suites(folder)} - {manifests.OWN} if folder else set()
    described = manifests.strategies(folder).values() if folder else ()
    files = {one.name: one.file for one in described if one.file}
    command, lines = "a run with the options of the others", []
    for one in settings:
        missing, whose = one.missing, one.entries["strategy"]
        if missing.dense:
            failed = (one.others["strategy"] == DENSE).any()
            lines.append(f"{one.task}: dense {'has no result' if failed else 'is missing'}, so nothing is ranked")
        sizes = missing.cells.columns.get_level_values("n_train").nunique()
        unit = "trials" if sizes > 1 else "tests" if one.networks else "repetitions"
        alike = defaultdict[str, list[str]](list)
        for strategy, lacking in missing.cells.groupby(whose).any().sum(axis=1).items():
            budgets = {share for i in whose.index[whose == strategy] for share in missing.shares.get(i, ())}
            parts = [f"macs {budget:g}" for budget in sorted(budgets, reverse=True)]
            parts += [f"{lacking} of {missing.cells.shape[1]} {unit}"] if lacking else []
            if parts:
                alike[", ".join(parts)].append(strategy)
        for text, strategies in alike.items():
            if len(suites) == 1:
                words = []
                for name, params in map(spec.parts_of, strategies):
                    given = ",".join(f"{key}={value}" for key, value in params.items())
                    words.append(":".join(filter(None, (files.get(name, name), given))))
                command = f"`sparsebench run {shlex.join(words)} --suite {shlex.quote(*suites)} --out FOLDER`"
                command += " with this folder and the run's other options"
            lines.append(f"{', '.join(strategies)} on {one.task}: not ranked there, without {text}; {command} adds it")
    return lines


def below_chance(frame: pd.DataFrame) -> list[str]:
    """Return a line for each setting with class folders in which dense is right less often than chance.

    Chance is what its answers come to on labels that have nothing to do with them, so that a network that gives one
    answer to everything, or answers that no folder has, is at chance. The test is exact: binomial, one-sided.
    """
    lines = set()
    numbered = [text for text in frame["setting"].unique() if '"labels":' in str(text)]
    for one in settings_of(frame[frame["setting"].isin(numbered)]) if numbered else ():
        tested = dense_of(one.records)[[*OUTCOMES, NETWORK]].drop_duplicates()
        for n, labels, predictions, network in tested.itertuples(index=False):
            if not n or not predictions or not described(one.params[0]):
                continue
            whose = f" with {network}" if len(one.networks) > 1 else ""
            answers, truth = numbers_of(predictions, n), numbers_of(labels, n)
            shares = np.bincount(answers, minlength=MOST_CLASSES) * np.bincount(truth, minlength=MOST_CLASSES)
            chance, right = float(shares.sum()) / n**2, int((answers == truth).sum())
            if bdtr(right, n, chance) < SURPRISING:
                lines.add(
                    f"{one.task}, {one.model}{whose}: dense is right in {right} of {n} pictures, and chance would be "
                    f"{chance * n:.0f}: the class folders are probably in another order than the head's classes; say "
                    "it with --task folder:classes=FILE"
                )
    return sorted(lines)


def failures(frame: pd.DataFrame) -> list[str]:
    """Return the cells that have no result, a line for those of one task that have none for the same reason."""
    bad = frame[frame["status"] != "ok"]
    counted = bad.groupby(["strategy", "task", "status", "reason"], observed=True).size()
    alike = defaultdict[tuple[str, str, str, int], list[str]](list)
    for (strategy, task, status, reason), n in sorted(counted.items()):
        name = strategy.partition("(")[0]
        alike[task, status, reason.removeprefix(f"'{name}' ").removeprefix(f"{name}: "), n].append(strategy)
    lines = []
    for (task, status, reason, n), strategies in alike.items():
        cells = f"{n} cell{'s' if n > 1 else ''}{' each' if len(strategies) > 1 else ''}"
        lines.append(f"{', '.join(strategies)} on {task}: {cells} {status}: {reason}")
    return lines


def machines(frame: pd.DataFrame) -> list[str]:
    """Return a line where records are of several devices, machines or versions."""
    good = frame[frame["status"] == "ok"]
    hashes, devices = good["environment"].nunique(), sorted({str(one) for one in good["device"].unique()})
    what = [f"on {', '.join(devices)}"] if len(devices) > 1 else []
    what += [f"on {hashes} machines, or with other versions"] if hashes > 1 else []
    return [f"made {' and '.join(what)}: speeds are compared on the same only"] if what else []


OWN_PICTURE, PNG = "leaderboard", b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1_000_000
"""Of pictures in a board, together; larger ones stay beside it."""
ADDRESSES = (
    (re.compile(r"(https?://[\w./?=&%~+:-]+\w)"), ""),
    (re.compile(r"doi\s*=\s*[{\"]\s*(10\.[\w./()-]+[\w)])"), "https://doi.org/"),
    (re.compile(r"(?i:arxiv|eprint)\W{1,6}(?:preprint arXiv:)?(\d{4}\.\d{4,5})"), "https://arxiv.org/abs/"),
)
"""Of a publication, as citations have them, and what stands before them."""
SEARCH = "https://scholar.google.com/scholar?q="


@dataclass(frozen=True)
class Board:
    """What records come to; a pure function of what lies in their folder.

    Attributes:
        judged: the leaderboard over all tasks; `by_task` with a row a task and model as well.
        notes: what a reader must know besides.
        bibtex: entries of what is in it.
        environments: machine and libraries by hash; `suites` lines that say what was asked for.
        pictures: PNG files by what they show, such as which tokens were kept.
        papers: what strategies cite and its address, by their names without parameters; a search where none is known.
    """

    judged: Leaderboard
    by_task: Leaderboard
    notes: list[str] = field(default_factory=list)
    bibtex: list[str] = field(default_factory=list)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    suites: list[str] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    papers: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def read(out: Path, metrics: Container[str] | None = METRICS) -> pd.DataFrame:
    """Return the records of a run's folder as a table, with badges, and whether and how each strategy is trained.

    It has the plain columns of `table`, those of outcomes, and the metrics: `metrics` or all, and those that tasks
    declare, of which the table's attributes say what they are, with what suites say of their board. Predictions are
    read as they are looked at. Pictures and weights have the names that users have for them.

    Raises:
        UserError: as `store.rows`.
    """
    import pyarrow as pa

    kinds = manifests.metrics(out)
    declared = {kind.name for kind in kinds}

    def wanted(name: str) -> bool:
        if not table.is_metric(name):
            return name not in (*table.PARTS, table.RANKS, "memory", table.CHECKSUM)
        return metrics is None or name in metrics or name in declared or ON_BACKGROUND.fullmatch(name) is not None

    rows = store.rows(out, wanted).drop_columns([table.CHECKSUM])
    rows = rows.sort_by([(name, "ascending") for name in ORDER])
    kept = {pa.string(), pa.binary()}
    records = rows.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if kind in kept else None)
    records = describe(_with_names(records, manifests.file_names(out)), out)
    records.attrs[DECLARED] = kinds
    suites = sorted(manifests.suites(out), key=lambda suite: len(suite.settings), reverse=True)
    records.attrs[MAIN] = tuple(dict.fromkeys(suite.main_task for suite in suites if suite.main_task))
    if success := next((suite.sample_complexity for suite in suites if suite.sample_complexity), ""):
        records.attrs[SUCCESS] = success
    return records


def _with_names(records: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return records with what users call their folders of pictures and files of weights, in place of hashes.

    A name that settings have for something else, such as shipped pictures, is followed by the hash.
    """
    settings, networks = (records[name].astype("category") for name in ("setting", "network"))
    text = "\n".join(settings.cat.categories)
    names = {name: f"{file} ({name})" if canonical(file) in text else file for name, file in names.items()}
    in_json = {canonical(name): canonical(file) for name, file in names.items()}
    pattern = re.compile("|".join(map(re.escape, in_json)) or "(?!)")
    return records.assign(
        setting=settings.cat.rename_categories(lambda one: pattern.sub(lambda found: in_json[found[0]], one)),
        network=networks.cat.rename_categories(lambda whole: " ".join(names.get(one, one) for one in whole.split(" "))),
    )


def describe(records: pd.DataFrame, out: Path) -> pd.DataFrame:
    """Return records with what a run's folder says of their strategies: badge, remarks, whether trained, and how."""
    every, known = reports.read(out), manifests.strategies(out)
    grouped = records.groupby(["strategy", "revision"], observed=True, sort=False)
    said, (submitted, badge) = [], _badge_of(out)
    for label, revision in grouped.groups:
        name = label.partition("(")[0]
        about = known.get((name, revision))
        trained = "" if about is None else "yes" if about.trained else "no"
        checked = reports.badge_of(every, label, revision)
        how = "" if about is None else how_of_label(about.how, label)
        said.append((*checked, trained, badge if name == submitted else "", plain(how)))
    number = grouped.ngroup()
    named = zip((CHECKS, REMARK, TRAINED, BADGE, HOW), zip(*said, strict=True), strict=True)
    return records.assign(**{name: pd.Categorical(values).take(number) for name, values in named})


def _badge_of(out: Path) -> tuple[str, str]:
    """Return whose submission a folder is and its badge, as far as its own records bear it; "" of any other folder."""
    if not os.path.lexists(out / MANIFEST):
        return "", ""
    from sparsebench.publish.verify import verify

    verdict = verify(out)
    return verdict.strategy, verdict.badge


def gather(folder: Path) -> Board:
    """Return the board of a run's folder, from what lies in it alone.

    Raises:
        UserError: the folder holds no records, or some by a later sparsebench.
    """
    return board_of(read(folder), folder)


def board_of(records: Flats, folder: Path) -> Board:
    """Return the board of some flat records of a run's folder, with what lies beside them."""
    frame = frame_of(records)
    judged, by_task = judge(frame), judge(frame, "task")
    asked = (suite for suite in manifests.suites(folder) if suite.name != manifests.OWN)
    suites = (plain(f"{suite.name}, version {suite.version}") for suite in asked)
    return Board(
        judged,
        by_task,
        notes=notes_on(frame, judged, folder),
        bibtex=bibtex(folder, frame),
        papers={one.name: found for one in _described(folder, frame) if (found := _paper(one))},
        environments=manifests.environments(folder, set(frame["environment"])),
        suites=list(dict.fromkeys(suites)),  # one that was asked for with other words is there again
        pictures=_pictures(folder),
    )


def bibtex(folder: Path, frame: pd.DataFrame) -> list[str]:
    """Return the entries of what the strategies of a board cite."""
    entries = (one.bibtex.strip().splitlines() for one in _described(folder, frame))
    return sorted({"\n".join(map(plain, lines)) for lines in entries} - {""})


def _described(folder: Path, frame: pd.DataFrame) -> list[manifests.Described]:
    """Return what is known of the strategies of a board."""
    known = manifests.strategies(folder)
    pairs = frame[["strategy", "revision"]].drop_duplicates().itertuples(index=False)
    sources = sorted({(label.partition("(")[0], revision) for label, revision in pairs})
    return [known[key] for key in sources if key in known]


def _paper(strategy: manifests.Described) -> tuple[str, str] | None:
    """Return what a strategy cites, and the first address in that: of the web, a DOI, or arXiv's; else of a search."""
    citation = plain(strategy.citation, 300)
    for pattern, begin in ADDRESSES:
        if (found := pattern.search(f"{strategy.bibtex} {strategy.citation}")) is not None:
            return citation, f"{begin}{found[1]}"
    return (citation, f"{SEARCH}{quote_plus(citation)}") if citation else None


def _pictures(folder: Path) -> dict[str, bytes]:
    """Return the PNG files of a folder by name, without the board's own, as many as there is room for."""
    pictures, room = {}, MOST_BYTES
    for path in files.files_in(folder.resolve(), ".png"):
        content = None if path.name.startswith(OWN_PICTURE) else files.content_or_none(path, room)
        if content is not None and content.startswith(PNG):
            pictures[plain(path.stem)] = content
            room -= len(content)
    return pictures
