"""Hostile submissions: none may end `verify` otherwise than with a verdict, or have a badge that it does not deserve.

python benchmarks/fuzz_submissions.py --cases 10000   # ten minutes; prints counts, seconds and peak memory

Each case is a sound submission in which one thing is broken or forged, drawn from a seed; where a forger would make the
manifest's hashes anew, that is done. The best badge that it may get follows from what was changed, not from `verify`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deserved import REPORTED, RESCORED, SHOWN, deserved, lowest, most_of

from sparsebench.contain.memory import forget_peak, peak
from sparsebench.publish.verify import BADGES, Badge, verify
from sparsebench.records.cell import canonical

MANIFEST, RECORDS = "manifest.json", "records/records.jsonl"
CLASSED = ("predicted", "label", "group", "rank")
ODD: tuple[Any, ...] = (
    -1, 0, 1, 0.5, -0.5, True, None, "", "x", "NaN", [], {}, [[]], 2**31, 2**63, 10**400, 1e308, -1e308, "\0", "../x",
    "/etc/passwd", "1", "a" * 70_000, {"": {"": 0}}, "\x1b[2J", "\ud800",
)  # fmt: skip
"""What takes the place of a value."""
RAW = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000, b"\xff")
"""What takes the place of a value and no JSON writer spells."""

MOST_MEMORY = 2**30
"""Bytes, of the process."""
PLACED = ("link", "link to itself", "hard link", "pipe", "folder", "gone", "huge", "strange", "linked folder")

Files = dict[str, bytes]


class Case(NamedTuple):
    """A submission, the best badge that it may have, and what is done to its folder besides."""

    kind: str
    files: Files
    most: Badge
    then: Callable[[Path], object] = lambda folder: None


def sealed(files: Files) -> Files:
    """Return the files with a manifest that has their hashes."""
    manifest = json.loads(files[MANIFEST])
    manifest["files"] = {name: hashlib.sha256(files[name]).hexdigest() for name in files if name != MANIFEST}
    return files | {MANIFEST: canonical(manifest).encode() + b"\n"}


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from leaves(one, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return JSON with another value at a path."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], new)
    return copy


class Forger:
    """Makes hostile submissions of a sound one."""

    def __init__(self, sound: Path):
        self.files = {p.relative_to(sound).as_posix(): p.read_bytes() for p in sorted(sound.rglob("*")) if p.is_file()}
        self.lines = self.files[RECORDS].splitlines()
        self.makers = (
            self.value, self.value, self.bit, self.bit, self.number, self.raw, self.noise, self.lines_, self.manifest,
            self.listed, self.placed, self.beside, self.bomb, self.source,
        )  # fmt: skip

    def case(self, rng: random.Random) -> Case:
        """Return one case."""
        return rng.choice(self.makers)(rng)

    def _with(self, kind: str, number: int, line: bytes, most: Badge) -> Case:
        lines = [*self.lines[:number], line, *self.lines[number + 1 :]]
        return Case(kind, sealed(self.files | {RECORDS: b"\n".join(lines) + b"\n"}), most)

    def _record(self, rng: random.Random) -> tuple[int, Any]:
        number = rng.randrange(len(self.lines))
        return number, json.loads(self.lines[number])

    def value(self, rng: random.Random) -> Case:
        """Put something odd in the place of any value of a record."""
        number, raw = self._record(rng)
        new = changed(raw, rng.choice(list(leaves(raw))), rng.choice(ODD))
        line = json.dumps(new, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        most = deserved(raw, new) if isinstance(new, dict) else "rejected"
        return self._with("value", number, line.encode(errors="surrogatepass"), most)

    def number(self, rng: random.Random) -> Case:
        """Change a number of a metric or of the trajectory a little."""
        number, raw = self._record(rng)
        numbers = [
            at for at in leaves(raw) if at[:1] in (("metrics",), ("trajectory",)) and _number(raw, at) is not None
        ]
        at = rng.choice(numbers)
        new = changed(raw, at, _number(raw, at) + rng.choice([1, 1e-6, -1e-6, 1e-3, 19]))
        return self._with("number", number, canonical(new).encode(), deserved(raw, new))

    def bit(self, rng: random.Random) -> Case:
        """Flip one bit of an outcome."""
        number, raw = self._record(rng)
        name = rng.choice([*CLASSED, "loss", *([SHOWN] if raw["outcomes"][SHOWN] else [])])
        content = bytearray(zlib.decompress(base64.b64decode(raw["outcomes"][name])))
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        packed = base64.b64encode(zlib.compress(bytes(content), 9)).decode()
        new = changed(raw, ("outcomes", name), packed)
        return self._with("bit", number, canonical(new).encode(), deserved(raw, new))

    def raw(self, rng: random.Random) -> Case:
        """Put what is no JSON, or hardly, in the place of a value."""
        number, raw = self._record(rng)
        mark = '"<here>"'
        text = canonical(changed(raw, rng.choice(list(leaves(raw))), "<here>"))
        return self._with("raw", number, text.encode().replace(mark.encode(), rng.choice(RAW)), "rejected")

    def noise(self, rng: random.Random) -> Case:
        """Change, add or remove bytes of a file, with or without its hash made anew."""
        name = rng.choice(sorted(self.files))
        content = bytearray(self.files[name])
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        files = self.files | {name: bytes(content)}
        if name == MANIFEST or rng.random() < 0.5:
            return Case("noise", files, "recounted" if files == self.files or name == MANIFEST else "rejected")
        lines = bytes(content).splitlines()
        most: Badge = "recounted"
        if name == RECORDS and len(lines) == len(self.lines):
            most = lowest("recounted", *map(most_of, self.lines, lines))
        return Case("noise", sealed(files), most)

    def lines_(self, rng: random.Random) -> Case:
        """Leave records out, double them, or change their order."""
        lines, (i, j) = list(self.lines), rng.sample(range(len(self.lines)), 2)
        what = rng.choice(["twice", "swapped", "two on a line", "torn", "blank"])
        if what == "twice":
            lines.insert(max(i, j), lines[i])
        elif what == "swapped":
            lines[i], lines[j] = lines[j], lines[i]
        elif what == "two on a line":
            lines[i] += lines[j]
        elif what == "blank":
            lines[i] = b""
        end = b"" if what == "torn" else b"\n"
        return Case(what, sealed(self.files | {RECORDS: b"\n".join(lines) + end}), "rejected")

    def manifest(self, rng: random.Random) -> Case:
        """Put something odd in the place of any value of the manifest."""
        raw = json.loads(self.files[MANIFEST])
        new = changed(raw, rng.choice(list(leaves(raw))), rng.choice(ODD))
        text = json.dumps(new).encode(errors="surrogatepass")
        return Case("manifest", self.files | {MANIFEST: text}, "recounted" if new == raw else "rejected")

    def listed(self, rng: random.Random) -> Case:
        """List a file of another place, or one that is not there, or leave one out."""
        raw, name = json.loads(self.files[MANIFEST]), rng.choice(sorted(set(self.files) - {MANIFEST}))
        other = rng.choice(
            ["../" + name, "/etc/passwd", name + "\0", "records/../" + name, "x" * 5000, "", ".", "suites"]
        )
        if rng.random() < 0.8:
            raw["files"][other] = raw["files"][name]
        if rng.random() < 0.5 or other not in raw["files"]:
            del raw["files"][name]
        return Case("listed", self.files | {MANIFEST: canonical(raw).encode()}, "rejected")

    def placed(self, rng: random.Random) -> Case:
        """Put something that is no plain file in the place of one, or beside it."""
        name = rng.choice(sorted(self.files))
        what = rng.choice(
            ["link", "link to itself", "hard link", "pipe", "folder", "gone", "huge", "strange", "linked folder"]
        )

        def place(folder: Path) -> None:
            path = folder / name
            if what == "strange":
                (path.parent / rng.choice(["x", ".git", "a\nb.json", "run.py"])).write_text("x")
                return
            if what == "linked folder":
                where = folder / "records"
                where.rename(folder.parent / "elsewhere")
                where.symlink_to(folder.parent / "elsewhere")
                return
            if what == "hard link":
                os.link(path, folder.parent / "other")
                return
            if what == "huge":
                os.truncate(path, 2**40)
                return
            path.unlink()
            if what == "link":
                path.symlink_to("/etc/passwd")
            elif what == "link to itself":
                path.symlink_to(path.name)
            elif what == "pipe":
                os.mkfifo(path)
            elif what == "folder":
                path.mkdir()

        return Case(what, self.files, "rejected", place)

    def beside(self, rng: random.Random) -> Case:
        """Put something odd in the place of any value of a suite, strategy or machine."""
        name = rng.choice(sorted(set(self.files) - {MANIFEST, RECORDS}))
        raw = json.loads(self.files[name])
        new = changed(raw, rng.choice(list(leaves(raw))), rng.choice(ODD))
        text = json.dumps(new).encode(errors="surrogatepass")
        return Case("beside", sealed(self.files | {name: text}), "recounted" if new == raw else "rejected")

    def bomb(self, rng: random.Random) -> Case:
        """Have what is small become large when it is read."""
        number, raw = self._record(rng)
        zeros = base64.b64encode(zlib.compress(bytes(5 * 10**7), 9)).decode()
        what = rng.choice(["zip", "zip of its size", "items", "nested", "long", "wide", "steps", "depth", "groups"])
        if what == "zip":
            raw["outcomes"]["loss"] = zeros
        elif what == "zip of its size":
            raw["outcomes"] |= dict.fromkeys((*CLASSED, "loss"), zeros) | {"n": 25 * 10**6}
        elif what == "items":
            raw["outcomes"]["n"] = rng.choice([200_001, 2**40, 2**62, 0, -5])
        elif what == "nested":
            raw["notes"] = {"a": "b"}
            for _ in range(900):
                raw["notes"] = {"a": raw["notes"]}
        elif what == "long":
            raw["label"] = "a" * 10**7
        elif what == "wide":
            raw["samples"] = {str(i): [] for i in range(4 * 10**5)} | {"x": "y"}
        elif what == "steps":
            raw["trajectory"] = raw["trajectory"][:1] * 50_000
        elif what == "depth":
            raw["cell"]["model"]["params"] |= dict.fromkeys(("depth", "dim", "m", "heads"), 10**9)
        else:
            raw["metrics"] |= {f"accuracy: {i}": raw["metrics"]["accuracy"] for i in range(1000)}
        most = {"zip": REPORTED, "zip of its size": "rejected", "items": "rejected", "steps": RESCORED}
        rejected = ("nested", "long", "wide", "depth")
        line = canonical(raw).encode()
        return self._with(what, number, line, "rejected" if what in rejected else most.get(what, REPORTED))

    def source(self, rng: random.Random) -> Case:
        """Name another revision, machine or setting."""
        number, raw = self._record(rng)
        at = rng.choice([("origin", "revision"), ("cell", "repetition"), ("cell", "n_train"), ("cell", "task", "name")])
        mine = raw["cell"]["strategy"]["name"] == json.loads(self.files[MANIFEST])["strategy"]
        new = changed(raw, at, {"revision": "0" * 64, "name": "other"}.get(at[-1], 10**6))
        new["cell_id"] = hashlib.sha256(canonical(new["cell"]).encode()).hexdigest()[:16]
        lines = [line for line in self.lines if line != self.lines[number]] + [canonical(new).encode()]
        lines.sort(key=lambda line: json.loads(line)["cell_id"])
        most: Badge = "rejected" if mine or at[0] == "cell" else "recounted"
        return Case("source", sealed(self.files | {RECORDS: b"\n".join(lines) + b"\n"}), most)


def _number(raw: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        raw = raw[key]
    return raw if isinstance(raw, int | float) and not isinstance(raw, bool) else None


def fuzz(sound: Path, cases: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how many cases of each kind there were, and what went wrong."""
    forger, counted, wrong = Forger(sound), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        for number in range(cases):
            case = forger.case(random.Random(f"{seed} {number}"))
            counted[case.kind] += 1
            arena = Path(place) / str(number)
            folder = arena / "strategy" / "version"
            for name, content in case.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            case.then(folder)
            there = sorted(arena.rglob("*"))
            try:
                badge = verify(folder).badge
            except Exception as error:
                wrong.append(f"{number} {case.kind}: {type(error).__name__}: {str(error)[:200]}")
                badge = "rejected"
            if BADGES.index(badge) > BADGES.index(case.most):
                wrong.append(f"{number} {case.kind}: {badge}, and deserves {case.most} at best")
            if sorted(arena.rglob("*")) != there or [p.name for p in Path(place).iterdir()] != [str(number)]:
                wrong.append(f"{number} {case.kind}: files were written")
            shutil.rmtree(arena)
    return counted, wrong


def sound_submission(place: Path) -> Path:
    """Return a submission of a small run: tokens with groups, and pictures with ten classes."""
    tasks = "theory:steps=2,test=16,spurious=0.2,relevant=0.4,tokens=20", "composite:epochs=1,test=40,pretrain_epochs=0"
    named = [part for task in tasks for part in ("--task", task)]
    run = ["run", "attn_topk", *named, "--n-train", "8", "--seeds", "1", "--device", "cpu", "--out", str(place / "out")]
    for line in (run, ["submit", str(place / "out"), "--to", str(place / "submissions")]):  # torch stays out of here
        subprocess.run([sys.executable, "-m", "sparsebench", *line], check=True, capture_output=True)
    (folder,) = (place / "submissions").glob("*/*")
    return folder


def main() -> int:
    """Fuzz, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sound", type=Path, help="a sound submission; one is made unless given")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sound-") as place:
        sound = asked.sound or sound_submission(Path(place))
        forget_peak()  # what made the sound one has its own
        held = peak()
        start = time.perf_counter()
        counted, wrong = fuzz(sound, asked.cases, asked.seed)
    for kind, count in sorted(counted.items()):
        print(f"{count:6} {kind}")
    seconds, most = time.perf_counter() - start, peak()
    memory = f"peak memory {most / 2**20:.0f} MiB, {held / 2**20:.0f} before"
    print(f"{counted.total()} submissions in {seconds:.0f} s; {memory}")
    print("\n".join(wrong) or "none ended otherwise than with a verdict, and none had a badge too high")
    return int(bool(wrong) or most > MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
