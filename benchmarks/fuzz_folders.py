"""Hostile run folders: no command that reads one may end in a traceback, hang, leak, or show anything that acts.

python benchmarks/fuzz_folders.py --cases 10000 --state fuzz.json   # the same command goes on where it was ended

It prints counts, seconds of the processor and peak memory; --first 375 --cases 25 makes those cases alone again.

Each case is a sound folder in which some things are broken, forged or placed, drawn from a seed; then some commands
read it, in this process, and now and then through the command line.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from fuzz_submissions import MANIFEST, MOST_MEMORY, ODD, RAW, changed, leaves, sealed, sound_submission

from sparsebench.cli import main as cli
from sparsebench.contain.memory import forget_peak, peak
from sparsebench.records.cell import canonical

SECRET = "no stranger's folder shows this"
PNG = b"\x89PNG\r\n\x1a\n"
AT_ONCE = 25
"""Cases after which is written how far it is."""
MOST_MORE = 2**29
"""Bytes that a folder may take besides what the process holds."""
SLOW, HANGS = 10.0, 60
"""Seconds of processor time that a command may take, and of any time after which it is ended."""
PAYLOADS = (
    "=cmd|' /C calc'!A0", "@SUM(1+1)*cmd", "+1+cmd", "-2+3+cmd", "\t=1+1", "\r=1+1", " =1+1", "x;=1+1", "\uff1d1+1",
    "<script>alert(1)</script>", "<img src=http://evil.example/t.png>", "</td><svg onload=alert(1)>", "<!-- x",
    "[x](javascript:alert(1))", "![x](http://evil.example/t.png)", "[x]: http://evil.example", "[x][y]", "`rm -rf`",
    "http://evil.example", "www.evil.example", "me@evil.example", "<http://evil.example>", "\\[x](http://evil.example)",
    "a\nb", "a\r\n| b | c |", "\n\n# x", "a|b", "\x1b[2J\x1b[31m", "\x9b31m", "\x07", "a\u202eb", "\u2066x", "a\u2028b",
    "\\input{/etc/passwd}", "$\\frac{$", "$x$", "%", "\ud800", "\0", "x" * 5000, "../../x", "/etc/passwd",
    "~~~", "", " ",
)  # fmt: skip
READS = (
    *(["leaderboard", "{folder}", "--format", form] for form in
      ("table", "md", "csv", "json", "latex", "html", "bibtex")),
    *(["leaderboard", "{folder}", "--format", form, "--by", "task"] for form in ("table", "md", "csv", "latex")),
    *(["leaderboard", "{folder}", "--format", form, "--view", view] for form in ("table", "md", "csv", "latex")
      for view in ("pairs", "matched")),
    ["leaderboard", "{folder}", "--wide"],
    *(["export", "{folder}", "--format", form, "-o", f"{{out}}/export.{form}"] for form in ("csv", "jsonl", "parquet")),
    ["merge", "{folder}", "{sound}", "-o", "{out}/merged"], ["merge", "{folder}", "-o", "{out}/alone"],
    ["status", "{folder}"], ["submit", "{folder}", "--to", "{out}/to"], ["submit", "{folder}", "--to", "{out}/to"],
    ["submit", "{folder}", "--strategy", "attn_topk", "--to", "{out}/to"],
    ["verify", "{folder}"], ["verify", "{folder}", "--json"], ["verify", "{sound}", "--board", "{folder}"],
)  # fmt: skip
WRITES = (["leaderboard", "{folder}", "--update"], ["leaderboard", "{folder}", "--check"])

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


def acts(name: str, text: str) -> str | None:  # noqa: C901
    """Return what acts in an output, by the ending of its name, or None."""
    allowed = {"\n"} | ({"\r"} if name.endswith("csv") else set())
    if name.endswith("html"):
        allowed |= set(text[text.find("<script") : text.rfind("</script>")]) if "<script" in text else set()
    if odd := next((c for c in text if not c.isprintable() and c not in allowed), None):
        return f"character {odd!a}"
    if name.endswith("csv"):
        for row in csv.reader(io.StringIO(text, newline="")):
            for cell in (part.strip() for one in row for part in one.split(";")):
                if len(cell) > 1 and cell[0] in "=+-@\t\r\uff1d" and not _is_number(cell):
                    return f"a formula: {cell[:60]}"
    if name.endswith("md"):
        bare = re.sub(r"\\[\\\[\]`<:.|]", "", text).replace("`sparsebench check`", "").replace("[ ]: 95", "")
        pattern = r"<[A-Za-z/!?]|\][(\[:]|://|\bwww\.\w|`|\w@\w+\."
        if match := re.search(pattern, bare):
            return f"markup: {bare[max(0, match.start() - 30) : match.end() + 30]!r}"
    if name.endswith("html"):
        for bad in ("<script>alert", "<img src=http", "<svg onload", 'href="javascript'):
            if bad in text:
                return f"markup: {bad}"
    if name.endswith("latex") and any("\\input{" in line for line in text.split("\n") if not line.startswith("%")):
        return "a command"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Reader:
    """Runs commands on a folder and says what went wrong."""

    def __init__(self, sound: Path):
        self.sound, self.log, self.runner = sound, io.StringIO(), CliRunner()
        root = logging.getLogger()
        root.handlers = [logging.StreamHandler(self.log)]
        self.commands = self.most = 0

    def read(self, line: list[str], folder: Path, out: Path, in_process: bool = True) -> Iterator[str]:
        """Yield what is wrong with one command."""
        out.mkdir()
        args = [part.format(folder=folder, sound=self.sound, out=out) for part in line]
        self.commands += 1
        begun = time.process_time()
        output = yield from (self._here(args) if in_process else self._there(args))
        if (took := time.process_time() - begun) > SLOW:
            yield f"took {took:.0f} s"
        form = args[args.index("--format") + 1] if "--format" in args else "text"
        texts = {f"output.{form if '-o' not in args else 'text'}": output[0], "errors.text": output[1]}
        for path in sorted(out.rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                yield from _leaks(content)
                if path.suffix in (".csv", ".jsonl") and "merged" not in str(path) and args[0] == "export":
                    texts[path.name] = content.decode()
        for name, text in texts.items():
            yield from _leaks(text.encode(errors="replace"))
            if wrong := acts(name, text):
                yield f"{name} has {wrong}"

    def _here(self, args: list[str]) -> Generator[str, None, tuple[str, str]]:
        self.log.seek(0)
        self.log.truncate()
        signal.alarm(HANGS)
        try:
            result = self.runner.invoke(cli, args)
        except Hang:
            yield "hangs"
            return "", ""
        finally:
            signal.alarm(0)
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            yield f"{type(error).__name__}: {str(error)[:150]}"
        elif result.exit_code not in (0, 1, 2):
            yield f"left with {result.exit_code}"
        return result.stdout, result.stderr + self.log.getvalue()

    def _there(self, args: list[str]) -> Generator[str, None, tuple[str, str]]:
        line = [sys.executable, "-m", "sparsebench", *args]
        done = subprocess.run(line, capture_output=True, timeout=HANGS * 3)
        output, errors = (text.decode(errors="backslashreplace") for text in (done.stdout, done.stderr))
        if done.returncode not in (0, 1, 2) or "Traceback" in errors:
            yield f"left with {done.returncode}: {errors[-300:]}"
        return output, errors


def _leaks(content: bytes) -> Iterator[str]:
    if SECRET.encode() in content or base64.b64encode((PNG + SECRET.encode())[:30]) in content:
        yield "shows what is private"


class Hang(BaseException):
    """A command waits; it is no error that a command may expect."""


def _raise(*_: object) -> None:
    raise Hang


def _state(arena: Path) -> list[tuple[str, int]]:
    """Return what lies in a folder, without what commands may write."""
    listed = []
    for path in sorted(arena.rglob("*")):
        name = path.relative_to(arena).as_posix()
        if not name.startswith(("out", "run/cache")):
            listed.append((name, path.lstat().st_mtime_ns if not path.is_dir() else 0))
    return listed


def fuzz(
    sound: Path, cases: Sequence[int], seed: int, commands: int = 2, through: int = 100
) -> tuple[Counter[str], Reader, list[str]]:
    """Return how many cases of each kind there were, who read them, and what went wrong."""
    stranger, reader, counted, wrong = Stranger(sound), Reader(sound), Counter[str](), list[str]()
    signal.signal(signal.SIGALRM, _raise)
    with tempfile.TemporaryDirectory(prefix="folders-") as where:
        for number in cases:
            rng, arena = random.Random(f"{seed} {number}"), Path(where) / str(number)
            kind, files, then = stranger.case(rng)
            counted.update(kind.split("+"))
            folder, private = arena / "run", arena / "private"
            _lay_out(folder, private, files, then)
            forget_peak()
            before, held = _state(arena), peak()
            lines = rng.sample(READS, commands) + ([rng.choice(WRITES)] if rng.random() < 0.05 else [])
            for i, line in enumerate(lines):
                in_process = bool(not through or number % through or i)
                wrong += [f"{number} {kind}: {' '.join(line)}: {each}"
                          for each in reader.read(line, folder, arena / f"out{i}", in_process)]  # fmt: skip
            if peak() - held > MOST_MORE:
                wrong.append(f"{number} {kind}: {(peak() - held) / 2**20:.0f} MiB more: {lines}")
            reader.most = max(reader.most, peak())
            if lines[-1] not in WRITES and _state(arena) != before:
                wrong.append(f"{number} {kind}: {lines}: files were written")
            if [path.name for path in Path(where).iterdir()] != [str(number)]:
                wrong.append(f"{number} {kind}: files were written outside")
            shutil.rmtree(arena)
    return counted, reader, wrong


def _lay_out(folder: Path, private: Path, files: Files, then: Callable[[Path, Path], object]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    private.mkdir()
    text = json.dumps({"processor": SECRET, "name": SECRET}).encode()
    for name, content in {"secret.json": text, "other.json": b"{}", "secret.png": PNG + SECRET.encode()}.items():
        (private / name).write_bytes(content)
    then(folder, private)


def main() -> int:
    """Fuzz, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sound", type=Path, help="a sound submission; one is made unless given")
    parser.add_argument("--state", type=Path, help="a file that holds how far it is")
    asked = parser.parse_args()
    about = {"next": asked.first, "commands": 0, "seconds": 0.0, "most": 0, "kinds": {}, "wrong": []}
    if asked.state and asked.state.is_file():
        about = json.loads(asked.state.read_bytes())
    end = asked.first + asked.cases
    with tempfile.TemporaryDirectory(prefix="sound-") as place:
        sound = asked.sound or sound_submission(Path(place))
        while about["next"] < end:
            cases, start = range(about["next"], min(about["next"] + AT_ONCE, end)), time.process_time()
            counted, reader, wrong = fuzz(sound, cases, asked.seed)
            about["next"], about["commands"] = cases.stop, about["commands"] + reader.commands
            about["seconds"] += time.process_time() - start
            about["most"] = max(about["most"], reader.most)
            about["kinds"], about["wrong"] = dict(Counter(about["kinds"]) + counted), about["wrong"] + wrong
            if asked.state:
                asked.state.write_text(json.dumps(about))
            print("\n".join([*wrong, f"{cases.stop} folders, {len(about['wrong'])} wrong"]), flush=True)
    for kind, count in sorted(about["kinds"].items()):
        print(f"{count:6} {kind}")
    memory = about["most"] / 2**20
    print(f"{asked.cases} folders, {about['commands']} commands in {about['seconds']:.0f} CPU-s; {memory:.0f} MiB")
    print("\n".join(about["wrong"]) or "none ended in a traceback, hung, leaked, wrote elsewhere, or showed what acts")
    return int(bool(about["wrong"]) or about["most"] > MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
