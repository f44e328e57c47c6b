"""Timing for benchmarks: variants take turns within one run, and a ratio is the median of the rounds' ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from tabulate import tabulate

Run = Callable[[], object]
Row = Sequence[object]
Seconds = dict[str, list[float]]

AGAIN, NOISE, TRIES = " again", 0.03, 3


def turns(variants: Mapping[str, Run], rounds: int, device: str = "cpu") -> Seconds:
    """Return the seconds of each variant in each round, after a warm-up round.

    The variants take turns. Each round starts with the next variant, so that no variant always follows the same one.
    Seconds are CPU seconds of this process, which other processes do not change; on a GPU they are wall seconds until
    all its work is done.
    """
    seconds: Seconds = {name: [] for name in variants}
    names, clock = list(variants), time.process_time if device == "cpu" else time.perf_counter
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _wait(device)
            start = clock()
            variants[name]()
            _wait(device)
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def settled(variants: Mapping[str, Run], rounds: int, device: str = "cpu") -> tuple[Seconds, str]:
    """Return the result of `turns`, and a line on the noise: the difference of "X again" and the identical "X".

    If the difference is over 3 %, the measurement is repeated, at most twice.
    """
    for tries in range(1, TRIES + 1):
        seconds = turns(variants, rounds, device)
        same = [ratio(seconds[name], seconds[name.removesuffix(AGAIN)]) for name in seconds if name.endswith(AGAIN)]
        note = f"A/A {_told(same)}" + (f" (measurement {tries})" if tries > 1 else "")
        if all(abs(each - 1) <= NOISE for each in same):
            return seconds, f"{note}."
    return seconds, f"{note}, which is over 3 % off."


def _told(same: Iterable[float]) -> str:
    return ", ".join(f"{each:.3f}" for each in same)


def table(headers: Sequence[str], rows: Sequence[Row], note: str = "") -> str:
    """Return the rows as a Markdown table, with a note below."""
    align = ("left", *["right"] * (len(headers) - 1))
    made = tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True, colalign=align)
    return f"{made}\n\n{note}" if note else made
