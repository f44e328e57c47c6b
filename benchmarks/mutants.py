"""Count the mutants that the tests detect: a fixed random sample, each tested with the tests of its room.

    pip install '.[test]' cosmic-ray
    python benchmarks/mutants.py --out mutants.jsonl --write benchmarks/mutants.md

cosmic-ray makes the mutants. The sample draws a place in the code, then one of its mutants, so that operators with many
replacements do not get more weight. Annotations are excluded, because their mutants change no behaviour. The file of
--out has one line for each mutant. The same command resumes a stopped run.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import numpy  # noqa: F401  imported once, before the forks
import pandas  # noqa: F401
import pytest
import scipy.special  # noqa: F401
import sklearn  # noqa: F401
import torch  # noqa: F401
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "stats": (["stats"], ["tests/stats"]),
    "measure": (["measure"], ["tests/measure"]),
    "board": (["board"], ["tests/board/test_golden.py", "tests/board"]),
    "tokens": (["strategy/tokens.py"], ["tests/strategy/test_tokens.py"]),
    "plans": (
        ["strategy/plan_checks.py", "strategy/selection.py"],
        ["tests/models/test_actor.py", "tests/measure/test_selection.py", "tests/strategies"],
    ),
}
"""The mutated rooms of sparsebench/, and the tests that should detect their mutants."""
NOT_DRAWN = ("core/ExceptionReplacer", "core/RemoveDecorator", "core/Variable")
"""Operators whose mutants do not resemble human errors."""
KEPT = 0
"""Exit code of pytest if all tests pass: the mutant was not detected."""


def annotations(text: str) -> set[tuple[int, int]]:
    """Return the (line, column) of each character of the annotations in a module."""
    places = set()
    for node in ast.walk(ast.parse(text)):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                lines = range(annotation.lineno, annotation.end_lineno + 1)
                places |= {
                    (line, column)
                    for line in lines
                    for column in range(
                        annotation.col_offset if line == annotation.lineno else 0,
                        annotation.end_col_offset if line == annotation.end_lineno else 1000,
                    )
                }
    return places


def mutants_of(path: Path) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the mutants of a module by (line, column): operator, and index of the occurrence in the module."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    text = path.read_text("utf-8")
    excluded, nodes = annotations(text), list(ast_nodes(get_ast(text)))
    places = defaultdict(list)
    for name in sorted(operator_names()):
        if name.startswith(NOT_DRAWN):
            continue
        operator, occurrence = get_operator(name)(), -1
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                occurrence += 1
                if start not in excluded:
                    places[start].append((name, occurrence))
    return places


def sample(count: int, seed: int) -> list[dict]:
    """Return a random sample of `count` mutants: room, file, line, operator, occurrence."""
    rng, candidates = random.Random(seed), []
    for room, (names, _) in ROOMS.items():
        roots = [ROOT / "sparsebench" / name for name in names]
        files = sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py")))
        for file in files:
            candidates += [(room, file, place, mutants) for place, mutants in sorted(mutants_of(file).items())]
    drawn = []
    for room, file, (line, column), mutants in rng.sample(candidates, count):
        operator, occurrence = rng.choice(mutants)
        drawn.append(
            {"room": room, "file": file.relative_to(ROOT).as_posix(), "line": line, "column": column,
             "operator": operator.removeprefix("core/"), "occurrence": occurrence}
        )  # fmt: skip
    return sorted(drawn, key=lambda mutant: (mutant["room"], mutant["file"], mutant["line"], mutant["column"]))


def run_tests(copy: Path, tests: list[str], seconds: float) -> str:
    """Run tests in a copy of the repository: "killed", "survived" or "too long".

    They run in a fork of this process, which has already imported the libraries.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        with open(os.devnull, "w", encoding="utf-8") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        signal.alarm(int(seconds))  # kills the fork
        sys.path[:0] = paths = [str(copy), str(copy / "plugins")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for processes that tests start
        os._exit(
            int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--integration", *tests]))
        )
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that are left over from tests
    if os.WIFSIGNALED(status):
        return "too long"
    return "survived" if os.WEXITSTATUS(status) == KEPT else "killed"


def change_of(text: str, changed: str) -> str:
    """Return the difference of the changed lines, as one line."""
    lines = difflib.unified_diff(text.splitlines(), changed.splitlines(), n=0, lineterm="")
    return " ".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def judge(mutants: list[dict], out: Path, seconds: float) -> Iterator[dict]:
    """Yield each mutant with its result, see `run_tests`, and the changed line."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    lines = out.read_text("utf-8").splitlines() if out.exists() else []
    done = {tuple(mutant[key] for key in mutants[0]): mutant for mutant in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder, out.open("a", encoding="utf-8") as file:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        for room, (_, tests) in ROOMS.items():
            of_room = [mutant for mutant in mutants if mutant["room"] == room]
            if all(tuple(mutant.values()) in done for mutant in of_room):
                yield from (done[tuple(mutant.values())] for mutant in of_room)
                continue
            if (result := run_tests(copy, tests, 10 * seconds)) != "survived":
                raise SystemExit(f"the tests of {room} do not pass without a mutant: {result}")
            for mutant in of_room:
                if (known := done.get(tuple(mutant.values()))) is None:
                    path = copy / mutant["file"]
                    text = path.read_text("utf-8")
                    changed = mutate_code(text, get_operator(f"core/{mutant['operator']}")(), mutant["occurrence"])
                    path.write_text(changed, "utf-8")
                    known = mutant | {"result": run_tests(copy, tests, seconds), "change": change_of(text, changed)}
                    path.write_text(text, "utf-8")
                    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
                    file.write(json.dumps(known) + "\n")
                    file.flush()
                yield known


@click.command()
@click.option("--count", default=400, show_default=True, help="Mutants.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=300.0, show_default=True, help="Time limit for the tests of a mutant.")
@click.option("--out", type=Path, required=True, help="One JSON line per mutant; an existing file is continued.")
@click.option("--write", type=Path, help="Counts and surviving mutants, as Markdown.")
def main(count: int, seed: int, seconds: float, out: Path, write: Path | None) -> None:
    """Make mutants, run the tests of their rooms, and count the detected mutants."""
    results = list(judge(sample(count, seed), out, seconds))
    rows = []
    for room in [*ROOMS, "all"]:
        of_room = [mutant for mutant in results if room in (mutant["room"], "all")]
        killed = sum(mutant["result"] != "survived" for mutant in of_room)
        rows.append((room, len(of_room), killed, f"{killed / len(of_room):.3f}"))
    text = tabulate(rows, ["room", "mutants", "killed", "share"], tablefmt="pipe")
    survivors = [f"- `{mutant['file']}:{mutant['line']}` {mutant['operator']}: `{mutant['change']}`"
                 for mutant in results if mutant["result"] == "survived"]  # fmt: skip
    click.echo(text)
    if write is not None:
        head = f"# Mutants\n\n{count} of seed {seed}, by `python benchmarks/mutants.py`.\n\n{text}\n\nNot noticed:\n\n"
        write.write_text(head + "\n".join(survivors) + "\n", "utf-8")


if __name__ == "__main__":
    main()
