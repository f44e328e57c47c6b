"""Forge submissions and replays, and test that none is *replayed* and that *reported* ones are never called verified.

python benchmarks/forge.py --cases 2000   # prints each kind with its badge; exits with 1 if a badge is too high

`sparsebench verify --replay all` judges each kind of forgery and the honest submission. Then random forgeries are
drawn: the cells, the numbers of items that are claimed to be correct, the loss and the machine. Their cells are
compared with the honest cells, which are the results of a replay.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench import api
from sparsebench.files import content_hash
from sparsebench.measure.cost import Step
from sparsebench.measure.metrics import scores
from sparsebench.models.vits import Vit
from sparsebench.plugin.content import file_revision
from sparsebench.publish import agreement, replays
from sparsebench.publish import submission as folders
from sparsebench.publish.about import About
from sparsebench.publish.replays import Replay
from sparsebench.publish.submission import items_of, submit
from sparsebench.records import manifests, store, table
from sparsebench.records.record import Cell, Record, bytes_of, canonical, numbers_of
from sparsebench.tasks.images import Spurious

Raw = dict[str, Any]
Change = Callable[[Raw], object]
NAME = "norm"
PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "plugins" / "good.py"
TASK = "spurious:epochs=1,test=100,canvas=16,foreground=8,pretrain_epochs=0"
MODEL = "vit:dim=16,depth=1,heads=1"
GROUPS = ["3 on flower", "3 on china", "8 on flower", "8 on china"]
CLAIMS = re.compile(r"verified|checked|confirmed|proven", re.IGNORECASE)
JUDGE = """
import sys
judge = sys.modules.get("sparsebench.publish.replay")
if judge is not None:
    judge.compare = lambda *args: ([], 0, 0.0)
"""
PEEKS = """
        import gc
        for one in gc.get_objects():
            if type(one).__name__ == "Samples" and len(one.labels) == len(view.tokens) and one.relevance is not None:
                return one.relevance
"""


def honest(place: Path, seeds: int = 2) -> Path:
    """Run a few cells and return their submission."""
    api.run(str(PLUGIN), suite="quick-scratch", tasks=TASK, model=MODEL, n_train=(8,), seeds=seeds,
            out=place / "out", jobs=0, device="cpu")  # fmt: skip
    return Path(submit(place / "out", place / "submissions").folder)


def said(folder: Path, **about: Any) -> Path:
    """Change fields of a manifest, and update the hash of its records."""
    made = folders.manifest_of(folder).model_copy(update=about | {"records": content_hash(folder / folders.RECORDS)})
    (folder / manifests.MANIFEST).write_text(canonical(made.model_dump(mode="json")) + "\n", "utf-8")
    return folder


def rewritten(folder: Path, records: Iterable[Record]) -> Path:
    """Replace the records of a submission."""
    path = folder / folders.RECORDS
    table.write(path, table.table_of((record, 0) for record in records), table.sidecars(path))
    return said(folder)


def changed(sound: Path, to: Path, change: Change, strategy: str | None = NAME) -> Path:
    """Return a copy of a submission below `to` with changed records of one strategy, or of all for None."""
    folder = Path(shutil.copytree(sound, to / sound.parent.name / sound.name))
    raws = [record.model_dump() for record in folders.read_records(folder)]
    for raw in raws:
        if strategy in (None, raw["cell"]["strategy"]["name"]):
            change(raw)
            raw["cell_id"] = Cell.model_validate(raw["cell"]).id
    return rewritten(folder, map(Record.model_validate, raws))


def put(value: Any, *path: Any) -> Change:
    """Return the change that sets a value at a path of a record."""

    def change(raw: Raw) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


def outcomes(raw: Raw, **arrays: np.ndarray) -> None:
    """Replace outcomes of a record, and all metrics that follow from them."""
    raw["outcomes"] |= {name: bytes_of(values) for name, values in arrays.items()}
    raw["outcomes"]["n"] = len(next(iter(arrays.values())))
    items = items_of(Record.model_validate(raw))
    names = GROUPS if raw["cell"]["task"]["name"] == "spurious" else ["all"]
    sizes = [int(raw["metrics"][f"train_samples: {name}"]["value"]) for name in names if len(names) > 1]
    for name, metric in scores(items, 2, names, sizes).items():
        if name != "test_loss" and not name.startswith("train_samples"):
            raw["metrics"][name] = metric.model_dump()
    for name in ("macs", "macs_dense", "macs_ratio"):
        raw["metrics"][name]["n"] = len(items.labels)


def improve(raw: Raw, k: int, loss: float = 1.0) -> int:
    """Make up to k more test items correct and multiply the loss; return the number of changed items."""
    items = items_of(Record.model_validate(raw))
    rows = np.flatnonzero(~items.correct)[:k]
    predicted, ranks = items.predicted.copy(), items.ranks.copy()
    predicted[rows], ranks[rows] = items.labels[rows], 0
    raw["metrics"]["test_loss"]["value"] *= loss
    outcomes(raw, predicted=predicted, rank=ranks)
    return len(rows)


def worsen(raw: Raw) -> None:
    """Make all test items wrong."""
    labels = items_of(Record.model_validate(raw)).labels
    outcomes(raw, predicted=1 - labels, rank=np.ones_like(labels))


def moved(raw: Raw) -> None:
    """Claim that a record was made on a GPU, where rounding differs."""
    raw["device"] = "NVIDIA H100"


def taken(which: slice) -> Change:
    """Return the change that selects or reorders the test items of a record."""

    def change(raw: Raw) -> None:
        n, names = raw["outcomes"]["n"], ("predicted", "label", "group", "rank", "foreground")
        outcomes(raw, **{name: numbers_of(raw["outcomes"][name], n)[which] for name in names})

    return change


def fewer_tokens(raw: Raw) -> None:
    """Halve the token counts of a record, and set its MACs accordingly."""
    for step in raw["trajectory"]:
        step["tokens_in"] = step["tokens_out"] = step["tokens_out"] / 2
    parts = raw["cell"]["task"]["params"], raw["cell"]["model"]["params"]
    cost = Vit(**parts[1]).cost(Spurious(**parts[0]), 2)
    macs = float(cost.macs([Step(**step) for step in raw["trajectory"]]))
    raw["metrics"]["macs"]["value"] = macs
    raw["metrics"]["macs_ratio"]["value"] = macs / raw["metrics"]["macs_dense"]["value"]


def sourced(sound: Path, to: Path, text: str, change: Change = lambda raw: None) -> Path:
    """Return a copy of a submission with another file of the strategy."""
    folder = changed(sound, to, change)
    manifest = folders.manifest_of(folder)
    (folder / folders.PLUGIN / manifest.file).write_text(text, "utf-8")
    revision = file_revision(folder / folders.PLUGIN / manifest.file)
    origin, old = manifest.plugin.model_copy(update={"revision": revision}), manifests.strategies(folder)
    about = old[NAME, manifest.plugin.revision].model_copy(update={"revision": revision})
    store.Store(folder).keep(manifests.STRATEGIES, about.model_dump(mode="json"))
    (suite,) = manifests.suites(folder)
    there = changed(folder, to / "again", put(origin.model_dump(mode="json"), "origin"))
    return said(there.rename(there.with_name(folders.version_of(suite, origin))), plugin=origin)


def kinds(sound: Path, place: Path) -> dict[str, tuple[str, Path]]:
    """Return the kinds of forgery: the highest correct badge of each, and its folder."""
    text, number = PLUGIN.read_text("utf-8"), iter(range(1000))

    def of(*changes: Change, strategy: str | None = NAME) -> Path:
        return changed(sound, place / str(next(number)), lambda raw: [change(raw) for change in changes], strategy)

    renamed = shutil.copytree(sound, place / "renamed" / "attn_topk" / sound.name)
    edited = of()
    (edited / folders.PLUGIN / PLUGIN.name).write_text(text.replace("1 if", "2 if"), "utf-8")
    lost = rewritten(of(), [record for record in folders.read_records(sound) if record.label != NAME])
    return {
        "a higher accuracy": ("rejected", of(put(0.999, "metrics", "accuracy", "value"))),
        "fewer MACs": ("rejected", of(put(1000.0, "metrics", "macs", "value"))),
        "cells left out": ("rejected", lost),
        "a file that was not run": ("rejected", edited),
        "a name with markup": ("rejected", of(put("<img src=x>", "cell", "strategy", "name"))),
        "the folder of another strategy": ("rejected", Path(renamed)),
        "outcomes that nobody had": ("reported", of(lambda raw: improve(raw, 10**6, 0.0))),
        "the same, of another machine": ("reported", of(lambda raw: improve(raw, 10**6, 0.0), moved)),
        "a lower loss, of another machine": ("reported", of(lambda raw: improve(raw, 0, 0.5), moved)),
        "a worse baseline, of another machine": ("reported", of(worsen, moved, strategy="random")),
        "an oracle as what it is not": ("reported", of(put("oracle", "kind"), strategy="random")),
        "other test items": ("reported", of(taken(slice(None, None, -1)), strategy=None)),
        "test items left out": ("reported", of(taken(slice(50)), strategy=None)),
        "fewer tokens": ("reported", of(fewer_tokens)),
        "fewer tokens, of another machine": ("reported", of(fewer_tokens, moved)),
        "the file of another strategy": ("reported", sourced(sound, place / "other", text.replace("(1 if", "(-1 if"))),
        "a file that replaces the judge": (
            "reported", sourced(sound, place / "judge", JUDGE + text, lambda raw: improve(raw, 10**6, 0.0))),
        "a file that reads the answers": (
            "reported", sourced(sound, place / "peeks", text.replace("view):", f"view):{PEEKS}"))),
    }  # fmt: skip


def replayed(sound: Path, to: Path, change: Change = lambda raw: None, by: str = "Somebody") -> Path:
    """Return a copy of a submission with a file of a replay: its own results, as if they were run again a day later.

    Args:
        sound: the submission.
        to: where the copy is.
        change: what is wrong with the replay, as JSON.
        by: who is said to have replayed.
    """
    folder = Path(shutil.copytree(sound, to / sound.parent.name / sound.name))
    results = [record for record in folders.read_records(folder) if record.status == "ok"]
    cells = [
        one.model_copy(update={"started": f"9{one.started[1:]}"}) for one in agreement.draw(results, NAME, None, 7)
    ]
    texts = store.Store(folder).values(manifests.ENVIRONMENTS, dict[str, str])
    machines = {Path(name).stem: machine for name, machine in texts.items()}
    records = folders.manifest_of(folder).records
    raw = Replay.of(cells, by=by, records=records, seed=7, number=None, machines=machines).model_dump(mode="json")
    change(raw)
    path = folder / replays.FOLDER / "1.json"
    path.parent.mkdir()
    path.write_text(json.dumps(raw), "utf-8")
    return folder


def kinds_of_replays(sound: Path, place: Path) -> dict[str, Path]:
    """Return the submissions with forged replays, by kind of forgery. The highest correct badge of each is reported."""
    number = iter(range(1000))

    def of(change: Change, by: str = "Somebody") -> Path:
        return replayed(sound, place / str(next(number)), change, by)

    def own_cell(raw: Raw) -> Raw:
        return next(cell for cell in raw["cells"] if cell["cell"]["strategy"]["name"] == NAME)

    def better(raw: Raw) -> None:
        own_cell(raw)["metrics"]["accuracy"]["value"] = 0.999

    def copies(raw: Raw) -> None:
        for cell in raw["cells"]:
            cell["started"] = f"2{cell['started'][1:]}"

    other_records = changed(sound, place / "other-records", lambda raw: improve(raw, 5))
    folder = replayed(sound, place / "moved")
    shutil.copytree(folder / replays.FOLDER, other_records / replays.FOLDER)
    about = About(authors=("Ada", "Bo"))
    authored = Path(shutil.copytree(sound, place / "authored" / sound.parent.name / sound.name))
    said(authored, about=about)
    return {
        "a replay of other records": other_records,
        "a replay of fewer cells": of(lambda raw: raw["cells"].pop()),
        "a replay of cells that no seed draws": of(lambda raw: raw["cells"].reverse()),
        "a replay with another seed": of(put(8, "seed")),
        "a replay of cells in another number": of(put(1, "number")),
        "a replay that contradicts itself": of(better),
        "a replay that is the report": of(copies),
        "a replay before the report": of(put("2000-01-01", "date")),
        "a replay without its machine": of(put({}, "machines")),
        "a replay on a machine that is not described": of(
            lambda raw: next(iter(raw["machines"].values())).update(cpu="other")
        ),
        "a replay of another revision": of(lambda raw: own_cell(raw)["origin"].update(revision="0")),
        "a replay that failed": of(lambda raw: own_cell(raw).update(status="failed", failure={"reason": "x"})),
        "a replay with other outcomes": of(lambda raw: own_cell(raw)["metrics"]["test_loss"].update(value=9.0)),
        "a replay by an author": replayed(authored, place / "by-author", by="ADA"),
        "a replay by an author with another space": replayed(authored, place / "by-space", by="B O."),
        "a replay by an author with a letter that nobody sees": replayed(authored, place / "by-filler", by="Bo\u3164"),
        "a replay by nobody": of(put("", "by")),
        "a replay by an escape code": of(put("\x1b[2J", "by")),
        "a replay that is no replay": of(lambda raw: raw.clear()),
    }


def judged(folder: Path, *more: str) -> tuple[str, str]:
    """Return the badge that `sparsebench verify` prints, and its whole output."""
    line = [sys.executable, "-m", "sparsebench", "verify", str(folder), *more]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    found = re.search(r": (rejected|reported|replayed): ", done.stdout)
    return found[1] if found else f"exit {done.returncode}", done.stdout + done.stderr


def grind(sound: Path, cases: int, seed: int) -> Counter[str]:
    """Draw random forgeries, and count those that agree with the replay, by claimed machine."""
    rng, counted, records = random.Random(seed), Counter[str](), list(folders.read_records(sound))
    for _ in range(cases):
        pairs, better, away = [], 0, rng.random() < 0.5
        for record in records:
            raw = record.model_dump()
            if record.label == NAME and rng.random() < 0.7:
                better += improve(raw, rng.randint(0, rng.choice([1, 5, 20])), rng.uniform(0.8, 1.0))
            if away:
                moved(raw)
            pairs.append((Record.model_validate(raw), record))
        wrong, _, points = agreement.compare(pairs, ())
        share = better / sum(record.outcomes.n for record in records if record.label == NAME and record.outcomes)
        machine = "another machine" if away else "this machine"
        counted[f"{machine}, {'agrees' if not wrong else 'does not agree'}"] += 1
        bound = max(agreement.MOST_BETTER, points / 100 + 1e-9) if away else 0.0
        counted["too high"] += not wrong and share > bound
    return counted


def main() -> int:
    """Print the badge of each kind of forgery, and the counts of random forgeries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="number of random forgeries")
    parser.add_argument("--seed", type=int, default=0)
    asked, wrong = parser.parse_args(), 0
    with tempfile.TemporaryDirectory(prefix="forged-") as where:
        sound = honest(Path(where))
        for kind, (best, folder) in {"honest": ("replayed", sound), **kinds(sound, Path(where) / "forged")}.items():
            badge, said = judged(folder, "--replay", "all", "--yes", "--device", "cpu")
            odd = badge == "replayed" if kind != "honest" else badge != best
            odd |= (best == "rejected" and badge != best) or (badge == "reported" and bool(CLAIMS.search(said)))
            wrong += odd
            print(f"{badge:10} {kind} (at most {best}){': WRONG' if odd else ''}", flush=True)
        for kind, folder in kinds_of_replays(sound, Path(where) / "replays").items():
            badge, said = judged(folder)
            odd = badge == "replayed" or bool(CLAIMS.search(said))
            wrong += odd
            print(f"{badge:10} {kind} (at most reported){': WRONG' if odd else ''}", flush=True)
        counted = grind(sound, asked.cases, asked.seed)
        print("\n".join(f"{count:8} {what}" for what, count in counted.most_common()))
    return int(bool(wrong or counted["too high"]))


if __name__ == "__main__":
    sys.exit(main())
