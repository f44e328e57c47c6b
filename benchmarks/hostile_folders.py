"""Hostile run folders made of a sound one: broken, forged, with texts that act, or with what is no plain file."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_submissions import MANIFEST, ODD, RAW, changed, leaves, sealed

from sparsebench.records.cell import canonical

PNG = b"\x89PNG\r\n\x1a\n"
PAYLOADS = (
    "=cmd|' /C calc'!A0", "@SUM(1+1)*cmd", "+1+cmd", "-2+3+cmd", "\t=1+1", "\r=1+1", " =1+1", "x;=1+1", "\uff1d1+1",
    "<script>alert(1)</script>", "<img src=http://evil.example/t.png>", "</td><svg onload=alert(1)>", "<!-- x",
    "[x](javascript:alert(1))", "![x](http://evil.example/t.png)", "[x]: http://evil.example", "[x][y]", "`rm -rf`",
    "http://evil.example", "www.evil.example", "me@evil.example", "<http://evil.example>", "\\[x](http://evil.example)",
    "a\nb", "a\r\n| b | c |", "\n\n# x", "a|b", "\x1b[2J\x1b[31m", "\x9b31m", "\x07", "a\u202eb", "\u2066x", "a\u2028b",
    "\\input{/etc/passwd}", "$\\frac{$", "$x$", "%", "\ud800", "\0", "x" * 5000, "../../x", "/etc/passwd",
    "~~~", "", " ",
)  # fmt: skip

Files = dict[str, bytes]


def spelled(raw: Any) -> bytes:
    """Return a record as a line, with the hash that its cell has."""
    if isinstance(raw, dict) and isinstance(raw.get("cell"), dict):
        with contextlib.suppress(ValueError, TypeError):
            raw["cell_id"] = hashlib.sha256(canonical(raw["cell"]).encode()).hexdigest()[:16]
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


class Stranger:
    """Makes hostile folders of a sound one."""

    def __init__(self, sound: Path):
        self.files = {p.relative_to(sound).as_posix(): p.read_bytes() for p in sorted(sound.rglob("*")) if p.is_file()}
        self.files |= {
            "metrics/0123456789abcdef.json": json.dumps({"name": "told", "unit": "s", "what": "what"}).encode(),
            "checks/0123456789abcdef.json": _report(self.files),
            "underway/here-1.json": _underway(),
            "tokens.png": PNG + b"x" * 50,
        }
        self.segment = next(name for name in self.files if name.endswith(".jsonl"))
        self.makers: tuple[Callable[[Files, random.Random], object], ...] = (
            self.value, self.value, self.payload, self.payload, self.payload_everywhere, self.raw, self.noise,
            self.beside, self.beside, self.metrics, self.bomb, self.lines, self.names,
        )  # fmt: skip

    def case(self, rng: random.Random) -> tuple[str, Files, Callable[[Path, Path], object]]:
        """Return what was done, the files, and what is done to the folder when they are there."""
        files, kinds = dict(self.files), []
        for _ in range(rng.choice([1, 1, 2, 3])):
            maker = rng.choice(self.makers)
            kinds.append(maker.__name__)
            maker(files, rng)
        if (kind := rng.choice(["submission", "sealed", "run"])) == "run":
            files.pop(MANIFEST, None)
        elif kind == "sealed" and files[MANIFEST] == self.files[MANIFEST]:
            files = sealed(files)
        kinds.append(kind)
        if rng.random() < 0.35:
            kinds.append("placed")
            what, name = (
                rng.choice(PLACED),
                rng.choice([*sorted(self.files), "x.png", "records/x.jsonl", "cache", "records"]),
            )
            return "+".join(kinds), files, lambda folder, private: place(folder, name, what, private)
        return "+".join(kinds), files, lambda folder, private: None

    def _raws(self, files: Files) -> list[Any]:
        raws = []
        for line in files[self.segment].splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                raws.append(json.loads(line))
        return raws or [{}]

    def _write(self, files: Files, raws: list[Any]) -> None:
        files[self.segment] = b"".join(spelled(raw) + b"\n" for raw in raws)

    def value(self, files: Files, rng: random.Random) -> None:
        """Put something odd in the place of any value of a record."""
        raws = self._raws(files)
        i = rng.randrange(len(raws))
        raws[i] = changed(raws[i], rng.choice(list(leaves(raws[i]))), rng.choice((*ODD, *PAYLOADS)))
        self._write(files, raws)

    def payload(self, files: Files, rng: random.Random) -> None:
        """Put a text that acts in the place of a text of a record."""
        raws = self._raws(files)
        i = rng.randrange(len(raws))
        raws[i] = _with_payload(raws[i], rng.choice(PAYLOADS), rng)
        self._write(files, raws)

    def payload_everywhere(self, files: Files, rng: random.Random) -> None:
        """Put such a text in the same place of all records, so that boards have rows and notes of it."""
        raws, text, seed = self._raws(files), rng.choice(PAYLOADS), rng.random()
        self._write(files, [_with_payload(raw, text, random.Random(seed)) for raw in raws])

    def raw(self, files: Files, rng: random.Random) -> None:
        """Put what is no JSON, or hardly, in the place of a value."""
        raws = self._raws(files)
        i = rng.randrange(len(raws))
        mark, lines = b'"<here>"', [spelled(raw) for raw in raws]
        lines[i] = spelled(changed(raws[i], rng.choice(list(leaves(raws[i]))), "<here>")).replace(mark, rng.choice(RAW))
        files[self.segment] = b"\n".join(lines) + b"\n"

    def noise(self, files: Files, rng: random.Random) -> None:
        """Change, add or remove bytes of a file."""
        name = rng.choice(sorted(files))
        content = bytearray(files[name]) or bytearray(b"x")
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        files[name] = bytes(content)

    def beside(self, files: Files, rng: random.Random) -> None:
        """Put something odd in the place of any value of a file beside the records, or all of it."""
        name = rng.choice([name for name in sorted(files) if name.endswith(".json")])
        try:
            raw = json.loads(files[name])
        except (ValueError, RecursionError):
            raw = {}
        new = changed(raw, rng.choice(list(leaves(raw))), rng.choice((*ODD, *PAYLOADS)))
        files[name] = rng.choice([*RAW, *[json.dumps(new).encode(errors="surrogatepass")] * 10])

    def metrics(self, files: Files, rng: random.Random) -> None:
        """Give metrics odd names and numbers."""
        raws = self._raws(files)
        one = {"value": 0.5, "unit": "fraction", "n": 3, "low": None, "high": None, "method": ""}
        name = rng.choice([
            "strategy", "status", "cell_id", "segment", "checks", "accuracy: x", "accuracy: <b>", "n_train", "setting",
            "told", "macs_ratio", *PAYLOADS,
        ])  # fmt: skip
        number = rng.choice([0.0, -1.0, 1e308, -1e308, 1e149, 1e-308, None, 5])
        for raw in raws if rng.random() < 0.5 else raws[:1]:
            if isinstance(raw, dict) and isinstance(raw.get("metrics"), dict):
                raw["metrics"][rng.choice([name, *raw["metrics"]])] = one | {"value": number}
        self._write(files, raws)

    def bomb(self, files: Files, rng: random.Random) -> None:  # noqa: C901
        """Have what is small become large when it is read."""
        raws = self._raws(files)
        what = rng.choice(
            ["zip", "largest", "items", "nested", "long", "wide", "steps", "metrics", "seeds", "segments"]
        )
        first: Any = raws[0] if isinstance(raws[0], dict) else {}
        packed = ("predicted", "label", "group", "rank", "foreground")
        if what == "zip":
            zeros = base64.b64encode(zlib.compress(bytes(5 * 10**7), 9)).decode()
            first["outcomes"] = dict.fromkeys((*packed, "loss"), zeros) | {"n": 25 * 10**6}
        elif what == "largest":
            zeros = base64.b64encode(zlib.compress(bytes(400_000), 9)).decode()
            for raw in raws:
                if isinstance(raw, dict):
                    raw["outcomes"] = dict.fromkeys((*packed, "loss"), zeros) | {"n": 200_000}
        elif what == "items":
            if isinstance(first.get("outcomes"), dict):
                first["outcomes"]["n"] = rng.choice([200_001, 2**40, 2**62, 0, -5])
        elif what == "nested":
            first["notes"] = {"a": "b"}
            for _ in range(900):
                first["notes"] = {"a": first["notes"]}
        elif what == "long":
            first["label"] = "a" * 10**7
        elif what == "wide":
            first["samples"] = {str(i): [] for i in range(10**5)}
        elif what == "steps":
            first["trajectory"] = [{"tokens_in": 1.0, "tokens_out": 1.0, "early": False, "scoring": ""}] * 50_000
        elif what == "metrics":
            one = {"value": 0.5, "unit": "fraction", "n": 3}
            first["metrics"] = {f"accuracy: {i}": one for i in range(rng.choice([1000, 9000, 20_000]))}
        elif what == "seeds":
            lines = [line for line in map(spelled, raws[:3]) if len(line) < 20_000]  # large ones are slow as they are
            raws += [json.loads(line) for line in lines for _ in range(100)]
            for number, raw in enumerate(raws):
                if isinstance(raw, dict) and isinstance(raw.get("cell"), dict):
                    raw["cell"]["repetition"] = number
        else:
            files |= {f"records/{i}.jsonl": b"{}\n" * 10 for i in range(300)}
        self._write(files, raws)

    def lines(self, files: Files, rng: random.Random) -> None:
        """Add lines that are none, or leave the end out."""
        line = rng.choice([b"\n", b"{}\n", b"1\n", b"\0" * 10**6, b"x" * 5 * 10**6 + b"\n", b"[" * 10**5 + b"\n"])
        files[self.segment] = (
            rng.choice([files[self.segment][:-20], line * rng.choice([1, 2000 if len(line) < 9 else 2])])
            + (files[self.segment])
        )

    def names(self, files: Files, rng: random.Random) -> None:
        """Give a file an odd name."""
        name = rng.choice(sorted(files))
        odd = rng.choice(["a\nb", "\x1b[31m", "=1+1", "<img src=x>", "._x", "x" * 200, "\u202ex", "[x](http:)", "-x"])
        files[f"{name.rpartition('/')[0] or '.'}/{odd}{Path(name).suffix}"] = files[name]


PLACED = ("link", "link to png", "zero", "urandom", "link to itself", "hard link", "pipe", "folder", "gone", "huge",
          "linked folder", "link to folder")  # fmt: skip


def place(folder: Path, name: str, what: str, private: Path) -> None:
    """Put something that is no plain file in the place of one."""
    path = folder / name
    if what in ("linked folder", "link to folder"):
        path = path if path.is_dir() else path.parent
        if path == folder:
            path = folder / "records"
        shutil.rmtree(path, ignore_errors=True)
        path.symlink_to(private if what == "link to folder" else private / "run" / path.name)
        return
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    targets = {"link": private / "secret.json", "link to png": private / "secret.png", "zero": Path("/dev/zero"),
               "urandom": Path("/dev/urandom"), "link to itself": path}  # fmt: skip
    if what in targets:
        path.symlink_to(targets[what])
    elif what == "hard link":
        os.link(private / "other.json", path)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "huge":
        path.touch()
        os.truncate(path, 2**40)


def _with_payload(raw: Any, text: str, rng: random.Random) -> Any:
    """Return a record with a text in one of the places that boards show, or in any that holds a text."""
    shown = [("label",), ("device",), ("kind",), ("cell", "task", "name"), ("cell", "strategy", "name"),
             ("cell", "model", "name"), ("environment",), ("notes", "inactive"), ("failure",)]  # fmt: skip
    at = rng.choice(shown)
    if rng.random() < 0.3:
        at = rng.choice([at for at in leaves(raw) if isinstance(_at(raw, at), str)] or [at])
    if at == ("failure",) and isinstance(raw, dict):
        return raw | {"status": "failed", "failure": {"reason": text, "kind": text, "traceback": text}}
    try:
        new = changed(raw, at, text)
    except (KeyError, IndexError, TypeError):
        return raw | {"notes": {"inactive": f"{text}: {text}"}} if isinstance(raw, dict) else raw
    return new | {"label": text} if at[:2] == ("cell", "strategy") and rng.random() < 0.5 else new


def _at(raw: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        raw = raw[key]
    return raw


def _report(files: Files) -> bytes:
    """Return a report of checks of a strategy that the folder has records of."""
    record = json.loads(next(content for name, content in files.items() if name.endswith(".jsonl")).splitlines()[0])
    outcome = {"check": "a_check", "group": "required", "says": "x", "status": "failed", "message": "m"}
    about = {"strategy": record["cell"]["strategy"]["name"], "origin": record["origin"], "outcomes": [outcome]}
    return json.dumps({"schema_version": 1, "versions": {"sparsebench": "0"}} | about).encode()


def _underway() -> bytes:
    cells = {"label": "dense", "n": 2}
    about = {
        "host": "here",
        "pid": 1,
        "workers": 1,
        "updated": time.time() + 10**6,
        "left": [cells],
        "running": [cells],
    }
    return json.dumps(about | {"estimate": [5.0, True]}).encode()
