"""Hostile run folders: no command that reads one may end in a traceback, hang, leak, or show anything that acts.

python benchmarks/fuzz_folders.py --cases 10000 --state fuzz.json   # the same command goes on where it was ended

It prints counts, seconds of the processor and peak memory; --first 375 --cases 25 makes those cases alone again.

Each case is a sound folder in which some things are broken, forged or placed, drawn from a seed; then some commands
read it, in this process, and now and then through the command line.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
import logging
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from click.testing import CliRunner
from fuzz_submissions import MOST_MEMORY, sound_submission
from hostile_folders import PNG, Files, Stranger

from sparsebench.cli import main as cli
from sparsebench.contain.memory import forget_peak, peak

SECRET = "no stranger's folder shows this"
AT_ONCE = 25
"""Cases after which is written how far it is."""
MOST_MORE = 2**29
"""Bytes that a folder may take besides what the process holds."""
SLOW, HANGS = 10.0, 60
"""Seconds of processor time that a command may take, and of any time after which it is ended."""
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
