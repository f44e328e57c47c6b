"""Forged submissions: none may have a badge above what is true, however long one tries; honest ones keep theirs.

python benchmarks/forge.py --minutes 60   # prints each kind with its badge, then how many of many forgeries got through

Ten kinds of forgery go through verify and a replay of all their cells, as does the honest submission, here and from a
clone of the project at another path. Then forgeries are drawn at random: which cells, how many of their test items are
said to be right, with what loss, on which machine. Of these the cells are run again once, as they come out the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_submissions import RECORDS, sealed

from sparsebench import api
from sparsebench.planning.request import Files
from sparsebench.plugin.registry import Registry
from sparsebench.publish import folder as folders
from sparsebench.publish import replay as replays
from sparsebench.publish import rescore
from sparsebench.publish.lines import record_of
from sparsebench.publish.replay import Here, replay
from sparsebench.publish.submit import submit
from sparsebench.publish.verify import BADGES, Verdict, verify
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import Record, pack, pack_reals
from sparsebench.spec import fill

Raw = dict[str, Any]
NAME = "longest"
PLUGIN = f"""
from typing import ClassVar
import sparsebench

class Longest(sparsebench.Strategy):
    \"\"\"Keeps the longest tokens.\"\"\"

    name: ClassVar[str] = "{NAME}"

    def scores(self, view):
        return view.tokens.norm(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Longest]
"""
PATCH = """
import sys
judge = sys.modules.get("sparsebench.publish.agree")
if judge is not None:
    judge.compare = lambda *given: judge.Agreement([], 0, 0.0)
"""
PEEKS = """
        import gc, torch
        for one in gc.get_objects():
            if type(one).__name__ == "Samples" and len(one.labels) == len(view.tokens):
                return one.relevance if one.relevance is not None else view.tokens.norm(dim=-1)
"""
TASK = "theory:steps=2,test=100,spurious=0.2,relevant=0.4,tokens=20,criterion=error"
GROUPS = ["-1 without spurious", "-1 with spurious", "+1 without spurious", "+1 with spurious"]


def raws_of(folder: Path) -> list[Raw]:
    """Return the records of a submission."""
    return [json.loads(line) for line in (folder / RECORDS).read_bytes().splitlines()]


def written(folder: Path, raws: list[Raw]) -> Path:
    """Write records into a submission, and its hashes anew, as a forger would."""
    for raw in raws:
        raw["cell_id"] = digest(raw["cell"])
    raws.sort(key=lambda raw: raw["cell_id"])
    (folder / RECORDS).write_bytes(b"".join(canonical(raw).encode() + b"\n" for raw in raws))
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.json*"))]
    for name, content in sealed({name: (folder / name).read_bytes() for name in names}).items():
        (folder / name).write_bytes(content)
    return folder


def improved(raw: Raw, k: int, loss: float) -> float:
    """Say that k more test items of a record were right, with a share of their loss, and all that follows."""
    record, _ = record_of(canonical(raw).encode())
    items = rescore.items_of(record)
    assert items is not None
    rows = np.flatnonzero(~items.correct)[:k]
    predicted, ranks, losses = items.predicted.copy(), items.ranks.copy(), items.losses.copy()
    predicted[rows], ranks[rows], losses[rows] = items.labels[rows], 0, losses[rows] * np.float32(loss)
    made = replace(items, predicted=predicted, ranks=ranks, losses=losses)
    raw["outcomes"] |= {"predicted": pack(predicted), "rank": pack(ranks), "loss": pack_reals(losses)}
    task = fill(Registry(shipped_only=True).task(record.cell.task.name), record.cell.task.params, "task")
    for name, *of in rescore._recompute(record, made, GROUPS, task, False).values():
        if name in raw["metrics"]:
            raw["metrics"][name] = dict(zip(("value", "unit", "n", "low", "high", "method"), of, strict=True))
    return len(rows) / len(items.labels)


class Forger:
    """Makes forgeries of an honest submission."""

    def __init__(self, honest: Path, place: Path):
        self.honest, self.place, self.made = honest, place, 0

    def copy(self, *, name: str = "", version: str = "") -> Path:
        """Return a copy of the honest submission."""
        self.made += 1
        names = name or self.honest.parent.name, version or self.honest.name
        return shutil.copytree(self.honest, self.place / str(self.made) / names[0] / names[1])

    def changed(self, change: Callable[[Raw], object], strategy: str | None = NAME) -> Path:
        """Return a copy whose records of a strategy, or of all, are changed."""
        folder, raws = self.copy(), raws_of(self.honest)
        for raw in raws:
            if strategy in (None, raw["cell"]["strategy"]["name"]):
                change(raw)
        return written(folder, raws)

    def moved(self, folder: Path) -> Path:
        """Return the copy, which claims another machine now."""
        (old,) = (folder / "environments").iterdir()
        about = json.loads(old.read_bytes()) | {"processor": "of somebody else"}
        old.unlink()
        (folder / "environments" / f"{digest(about)}.json").write_text(canonical(about))
        raws = raws_of(folder)
        for raw in raws:
            raw["environment"] = digest(about)
        return written(folder, raws)

    def sourced(self, plugin: Path, change: Callable[[Raw], object] = lambda raw: None) -> Path:
        """Return a copy whose strategy is published with another revision."""
        revision = replays.file_revision(plugin)

        def to_source(raw: Raw) -> None:
            raw["origin"]["revision"] = revision
            change(raw)

        folder = self.changed(to_source)
        for path in (folder / "manifest.json", *(folder / "strategies").iterdir()):
            about = json.loads(path.read_bytes())
            if path.name == "manifest.json":
                about["plugin"]["revision"] = revision
                about["version"] = f"{self.honest.name.rpartition('-')[0]}-{revision}"
            elif about["name"] == NAME:
                about["revision"] = revision
                path.unlink()
                path = path.with_name(f"{digest(about)}.json")
            path.write_text(canonical(about) + "\n" * (path.name == "manifest.json"))
        there = folder.rename(folder.with_name(f"{self.honest.name.rpartition('-')[0]}-{revision}"))
        return written(there, raws_of(there))


def put(value: Any, *path: Any) -> Callable[[Raw], None]:
    """Return what puts a value at a path of a record."""

    def change(raw: Raw) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


def fewer(raw: Raw) -> None:
    """Leave half of the test items out."""
    items = rescore.items_of(record_of(canonical(raw).encode())[0])
    assert items is not None
    keep = slice(len(items.labels) // 2)
    texts = {"predicted": items.predicted, "label": items.labels, "group": items.groups, "rank": items.ranks}
    raw["outcomes"] |= {name: pack(values[keep]) for name, values in texts.items()}
    raw["outcomes"] |= {"loss": pack_reals(items.losses[keep]), "n": len(items.labels[keep])}


def all_right(raw: Raw) -> None:
    """Say that all test items were right, without loss."""
    improved(raw, 10**6, 0.0)


def as_shipped(raw: Raw) -> None:
    """Say that the strategy is one that comes with sparsebench."""
    raw["cell"]["strategy"]["name"] = raw["label"] = "attn_topk"


def kinds(forger: Forger, plugin: Path, place: Path) -> dict[str, tuple[str, Path, Path]]:
    """Return the ten kinds of forgery: the best badge that is true of each, its folder and its plugin file."""
    evil, peeks = place / "evil.py", place / "peeks.py"
    evil.write_text(PATCH + plugin.read_text(encoding="utf-8"))
    peeks.write_text(
        plugin.read_text(encoding="utf-8").replace("scores(self, view):", f"scores(self, view):{PEEKS}", 1)
    )
    made = {
        "outcomes that nobody had": ("recounted", forger.changed(all_right)),
        "the same, of another machine": ("recounted", forger.moved(forger.changed(all_right))),
        "test items left out": ("reported", forger.changed(fewer, None)),
        "a name with markup": ("rejected", forger.changed(put("<img src=x>", "cell", "strategy", "name"))),
        "the name of a shipped strategy": ("rejected", forger.changed(as_shipped)),
        "a time that never comes": ("rejected", forger.changed(put("9999-12-31T23:59:59.999999+00:00", "started"))),
        "an oracle as what it is not": ("rejected", forger.changed(put("oracle", "kind"), "random")),
        "the folder of another strategy": ("rejected", forger.copy(name="attn_topk")),
    }
    listed = {kind: (badge, folder, plugin) for kind, (badge, folder) in made.items()}
    listed["a plugin that replaces the judge"] = ("recounted", forger.sourced(evil, all_right), evil)
    listed["a plugin that reads the answers"] = ("recounted", forger.sourced(peeks), peeks)
    return listed


def judged(folder: Path, plugin: Path, number: int | None = None) -> Verdict:
    """Return the verdict on a submission after a replay."""
    verdict = verify(folder, placed=True)
    replay(folder, verdict, number, Here(plugin, Files(), "cpu"))
    return verdict


def is_above(badge: str, most: str) -> bool:
    """Say whether a badge is above another."""
    return BADGES.index(badge) > BADGES.index(most)  # type: ignore[arg-type]


def grind(
    forger: Forger, plugin: Path, again: dict[str, Record], minutes: float, seed: int
) -> tuple[Counter[str], float]:
    """Forge until the time is over; return how many had which badge, those above what is true by themselves.

    Also returns the most points that a forgery of another machine gained with a badge, which said no less.
    """
    counted, most, rng = Counter[str](), 0.0, random.Random(seed)
    replays._run, kept = lambda records, *given: {one.cell_id: again[one.cell_id] for one in records}, replays._run
    replays._unfair, fair = lambda *given: [], replays._unfair
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        gains: dict[str, float] = {}
        share, k, loss, away = rng.random(), rng.choice([1, 2, 5, 20, 100]), rng.random(), rng.random() < 0.5

        def change(raw: Raw, share: float = share, k: int = k, loss: float = loss, gains: Any = gains) -> None:
            raw["seconds"] *= rng.random()
            if rng.random() < share and (gain := improved(raw, rng.randint(1, k), loss)):
                gains[digest(raw["cell"])] = gain

        folder = forger.changed(change)
        folder = forger.moved(folder) if away else folder
        number = rng.choice([1, 2, 4, 8, None])
        verdict = judged(folder, plugin, number)
        drawn = [cell for cell in gains if any(cell in note for note in verdict.notes)]
        counted[
            f"{verdict.badge}{'' if drawn or not gains else ', no forged cell drawn'}{'' if gains else ', honest'}"
        ] += 1
        if verdict.badge == "replayed" and drawn:
            counted["above what is true"] += 1
        if verdict.badge == "replayed (elsewhere)" and drawn:
            cells = sum(r.cell.strategy.name == NAME and any(r.cell_id in n for n in verdict.notes)
                        for r in again.values())  # fmt: skip
            points = 100 * sum(gains[cell] for cell in drawn) / cells
            most = max(most, points)
            counted["above what is true"] += int(points > (verdict.points or 0.0) + 0.01)
        shutil.rmtree(folder.parents[1])
    replays._run, replays._unfair = kept, fair
    return counted, most


def in_a_clone(honest: Path, plugin: Path, place: Path) -> str:
    """Return what `sparsebench verify` says of an honest submission in a clone of the project at another path."""
    root = Path(__file__).resolve().parents[1]
    subprocess.run(["git", "clone", "-q", root, place / "clone"], check=True)
    folder = shutil.copytree(honest, place / "elsewhere" / honest.parent.name / honest.name)
    file = shutil.copy(plugin, place / "elsewhere" / plugin.name)
    path = os.pathsep.join(str(place / "clone" / name) for name in (".", "plugins"))
    line = ["-m", "sparsebench", "verify", folder, "--replay", "all", "--plugin", file, "--yes", "--json"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, *line], cwd=place, env=environment, capture_output=True, text=True)
    return str(json.loads(done.stdout)[0]["badge"]) if done.returncode == 0 else done.stderr[-300:]


def main() -> int:
    """Forge, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3, help="repetitions of each cell of the honest submission")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forged-") as where:
        place = Path(where)
        plugin = place / f"{NAME}.py"
        plugin.write_text(PLUGIN)
        made = place / "out"
        api.run(str(plugin), suite="quick-scratch", tasks=TASK, n_train=(8, 16), seeds=asked.seeds, out=made, jobs=0,
                device="cpu")  # fmt: skip
        honest = submit(made, place / "submissions").folder
        forger = Forger(honest, place / "forged")
        badges = {"here": judged(honest, plugin).badge, "moved": judged(forger.moved(forger.copy()), plugin).badge,
                  "in a clone at another path": in_a_clone(honest, plugin, place)}  # fmt: skip
        for name, badge in badges.items():
            print(f"{badge:20} honest, {name}", flush=True)
        wrong = sum(not badge.startswith("replayed") for badge in badges.values())
        for kind, (most, folder, file) in kinds(forger, plugin, place).items():
            badge = judged(folder, file).badge
            wrong += is_above(badge, most)
            print(f"{badge:20} {kind} (at most {most})", flush=True)
        records = [record_of(line)[0] for line in folders.lines(honest)]
        counted, most_points = grind(forger, plugin, {one.cell_id: one for one in records}, asked.minutes, asked.seed)
        for badge, count in counted.most_common():
            print(f"{count:8} {badge}")
        print(
            f"{asked.minutes:g} minutes; the most that another machine bought is {most_points:.2f} points, as it says"
        )
    return int(bool(wrong or counted["above what is true"]))


if __name__ == "__main__":
    sys.exit(main())
