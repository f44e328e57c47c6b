"""Sample plugins: files with one strategy that does one thing wrong, made from a table, and copies of tests/plugins."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "SPARSEBENCH_SAMPLES"
"""Environment variable that gives the folder of the files to processes started by tests."""
KEPT = Path(__file__).resolve().parents[1] / "plugins"
SAMPLE = '''"""{what}"""

import ctypes
import gc
import os
import signal
import sys
import time
from contextlib import suppress

import torch

import sparsebench

DONE = []


class Sample(sparsebench.Strategy):
    name = "{name}"

    def {method}:
        {body}


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Sample]
'''
SCORES, PLAN = "scores(self, view)", "plan(self, view, keep)"
SUM = "return view.tokens.sum(dim=-1)"
TABLE: dict[str, tuple[str, ...]] = {
    "allocates": ("Allocates memory without end.", "while True:\n    DONE.append(torch.ones(64 * 2**20))"),
    "clings": (
        "Hangs in C with the interpreter's lock held, after it has started processes that are hard to find and to end.",
        "if os.fork() == 0:\n    os.setsid()\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
        'print("asleep", flush=True)\nctypes.PyDLL(None).sleep(600)',
    ),
    "closes": (
        "Replaces open file descriptors by other files.",
        f"file = os.open(os.devnull, os.O_RDWR)\nfor number in range(64):\n    os.dup2(file, number)\n{SUM}",
    ),
    "draws": ("Draws from torch's global generator.", "return torch.rand(view.index.shape)"),
    "duplicates": ("Keeps the first token several times.", "return sparsebench.Keep(view.index[:, :keep] * 0)", PLAN),
    "exits": ("Ends the process without a message.", "os._exit(0)"),
    # Only once: if copies forked at every call, the machine would soon have too many processes.
    "forks": ("Continues in two processes.", f"DONE or DONE.append(os.fork())\n{SUM}"),
    "interrupts": ("Raises KeyboardInterrupt, like Ctrl-C.", "raise KeyboardInterrupt"),
    "leaves": ("Exits the process.", "sys.exit(3)"),
    "nan_scores": ("Scores every token with NaN.", 'return view.tokens.mean(dim=-1) * float("nan")'),
    "no_plan": ("Returns positions instead of a plan.", "return view.index[:, :keep]", PLAN),
    "out_of_range": ("Keeps tokens that do not exist.", "return sparsebench.Keep(view.index[:, :keep] + 1000)", PLAN),
    "peeks_at_labels": (
        "Searches all objects for the labels of the split, and keeps tokens that depend on the labels.",
        "scores = view.tokens.sum(dim=-1)\nfor thing in gc.get_objects():\n"
        '    if type(thing).__name__ == "Samples" and len(thing.labels) == len(scores):\n'
        "        scores = torch.sin(scores + thing.labels[:, None] * torch.arange(scores.shape[1]))\nreturn scores",
    ),
    "prints": (
        "Writes to the standard output in each pass.",
        'print("a line\\nand another")\nos.write(1, b\'{"not": "a record"}\\n\')\n' + SUM,
    ),
    "raises": ("Raises an error with a message of two lines.", 'raise ValueError("no idea which token\\nmatters")'),
    "raises_contract": (
        "Raises sparsebench's error for strategies, with a message of two lines.",
        'raise sparsebench.StrategyError("no idea which token\\nmatters")',
    ),
    "scales": ("Changes its view in place.", "return view.tokens.mul_(2).norm(dim=-1)"),
    "scribbles": (
        "Writes to all file descriptors.",
        "for number in range(64):\n    with suppress(OSError):\n"
        f'        os.write(number, b"nobody can read this")\n{SUM}',
    ),
    "segfaults": ("Reads address 0, which ends the process.", "return ctypes.string_at(0)"),
    "sleeps": (
        "Sleeps for a minute in each pass, and prints this.",
        f'print("asleep", flush=True)\ntime.sleep(60)\n{SUM}',
    ),
    "undeclared_relevance": ("Reads the relevance mask without declaring it.", "return view.relevance"),
    "unsupported": (
        "Raises UnsupportedError.",
        'raise sparsebench.UnsupportedError("only for round tokens")',
    ),
    "wrong_shape": ("Returns a score for each channel of a token, not for each token.", "return view.tokens"),
}
"""For each sample: what it does, the code, and the method if it is not scores()."""


def _written() -> Path:
    """Return the folder with all sample files, written by the process that started the tests."""
    if VARIABLE not in os.environ:
        folder = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="samples-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        shutil.copytree(KEPT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name, (what, body, *method) in TABLE.items():
            body = body.replace("\n", "\n" + 8 * " ")
            text = SAMPLE.format(what=what, name=name, method=[*method, SCORES][0], body=body)
            Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
    return Path(os.environ[VARIABLE])


SAMPLES = _written()
