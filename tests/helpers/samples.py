"""Sample plugins: files of one strategy that does one thing wrong, from a table, beside those of tests/plugins."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "SPARSEBENCH_SAMPLES"
"""Says to the processes that tests start where the files are."""
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
    "allocates": ("Takes memory as long as there is any.", "while True:\n    DONE.append(torch.ones(64 * 2**20))"),
    "clings": (
        "Hangs in C with the interpreter's lock held, after it has started processes that are hard to find and to end.",
        "if os.fork() == 0:\n    os.setsid()\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
        'print("asleep", flush=True)\nctypes.PyDLL(None).sleep(600)',
    ),
    "closes": (
        "Puts other files where descriptors were.",
        f"file = os.open(os.devnull, os.O_RDWR)\nfor number in range(64):\n    os.dup2(file, number)\n{SUM}",
    ),
    "duplicates": ("Keeps the first token again and again.", "return sparsebench.Keep(view.index[:, :keep] * 0)", PLAN),
    "exits": ("Ends the process without a word.", "os._exit(0)"),
    # Once, as copies that fork again at every call are soon too many for the machine.
    "forks": ("Goes on in two processes.", f"DONE or DONE.append(os.fork())\n{SUM}"),
    "interrupts": ("Raises what Ctrl-C raises.", "raise KeyboardInterrupt"),
    "leaves": ("Leaves the process.", "sys.exit(3)"),
    "nan_scores": ("Scores every token with NaN.", 'return view.tokens.mean(dim=-1) * float("nan")'),
    "no_plan": ("Returns positions where a plan is due.", "return view.index[:, :keep]", PLAN),
    "out_of_range": ("Keeps tokens that are not there.", "return sparsebench.Keep(view.index[:, :keep] + 1000)", PLAN),
    "peeks_at_labels": (
        "Walks all objects there are for the labels of the split, and keeps other tokens for other labels.",
        "scores = view.tokens.sum(dim=-1)\nfor thing in gc.get_objects():\n"
        '    if type(thing).__name__ == "Samples" and len(thing.labels) == len(scores):\n'
        "        scores = torch.sin(scores + thing.labels[:, None] * torch.arange(scores.shape[1]))\nreturn scores",
    ),
    "prints": (
        "Writes to the standard output in each pass.",
        'print("a line\\nand another")\nos.write(1, b\'{"not": "a record"}\\n\')\n' + SUM,
    ),
    "raises": ("Raises an error of two lines.", 'raise ValueError("no idea which token\\nmatters")'),
    "raises_contract": (
        "Raises the error that sparsebench has for strategies, with two lines.",
        'raise sparsebench.StrategyError("no idea which token\\nmatters")',
    ),
    "scribbles": (
        "Writes to all descriptors there are.",
        "for number in range(64):\n    with suppress(OSError):\n"
        f'        os.write(number, b"nobody can read this")\n{SUM}',
    ),
    "segfaults": ("Reads address 0, which ends the process.", "return ctypes.string_at(0)"),
    "sleeps": ("Takes a minute for each pass, and says so.", f'print("asleep", flush=True)\ntime.sleep(60)\n{SUM}'),
    "undeclared_relevance": ("Reads the mask without having said so.", "return view.relevance"),
    "unsupported": (
        "Says that it cannot act here.",
        'raise sparsebench.UnsupportedError("only for round tokens")',
    ),
    "wrong_shape": ("Scores every number of a token, and not every token.", "return view.tokens"),
}
"""What each does, how, and in which method if not in scores."""


def _written() -> Path:
    """Return a folder with all sample files, that of the process that began the tests."""
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
