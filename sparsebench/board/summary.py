"""What a board tells first: what the data and networks are, and which strategies are best at each budget."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sparsebench.board.board import Row
from sparsebench.board.columns import Column
from sparsebench.board.entries import DENSE, OUTCOMES, Entry, Key, Setting
from sparsebench.stats.paired import Pairs
from sparsebench.text import few, plain

TRACKS = {
    "frozen": "the networks are trained without a strategy, which acts in the test alone",
    "tuned": "trained networks are trained on for a little with each strategy",
    "scratch": "each network is trained with its strategy from the first step",
}
BY_CONTENT = re.compile(r"-[0-9a-f]{12}$")
"""Ends the name of a user's own pictures."""
NAMED = 3
"""Strategies that are named at a budget; of the others it is said how many there are."""
COLUMNS = (
    Column("budget", "MACs / dense", "text", "what was asked for"),
    Column("best", "best strategies", "text", "from which the best one does not differ significantly"),
    Column("accuracy", "accuracy, %", "text", "of the best one, mean over networks or seeds"),
    Column("against_dense", "- dense, points", "text", "of the best one, with a 95 % interval"),
    Column("random", "random, %", "text", "accuracy of random_inside"),
    Column("against_random", "- random, points", "text", "of the best one, with a 95 % interval"),
    Column("speed_up", "speed-up", "text", "images/s of the best one over dense's, median"),
)


def about(main: Setting) -> str:
    """Return in a sentence each what the data, the networks and the track are."""
    task, model = main.params
    entry = next((one for key, one in main.largest_entries.items() if key[0] == DENSE), None)
    named = (BY_CONTENT.sub("", str(task[name])) for name in ("images", "backgrounds") if task.get(name))
    pictures = " on ".join(named)
    data = [f"{main.task} ({pictures})" if pictures else main.task, *_tested(entry)]
    number = len(main.networks) or (0 if entry is None else len(set(entry.seeds.tolist())))
    size = ", ".join(f"{name} {model[name]}" for name in ("depth", "dim", "heads", "patch") if name in model)
    networks = f"{number or 'no'} of {main.model}" + (f" ({size})" if size else "")
    track = TRACKS.get(main.track, "")
    return plain(f"Data: {', '.join(data)}. Networks: {networks}. Track {main.track}: {track}.", 500)


def _tested(dense: Entry | None) -> list[str]:
    """Return how many classes and test images there are, as far as that is known."""
    if dense is None:
        return []
    items, labels, _ = (dense.column(name) for name in OUTCOMES)
    known = [(n, text) for n, text in zip(items.tolist(), labels, strict=True) if n]
    if not known:
        return []
    classes = 1 + max(int(dense.columns.numbers(text, n).max()) for n, text in known)
    return [f"{classes} classes", f"{known[0][0]:,} images in each test"]


def best(
    main: Setting, ranked: Sequence[Row], pairs: Pairs, rows: Sequence[Row], budgets: Sequence[float]
) -> list[Row]:
    """Return for dense and for each budget the strategies that do not differ significantly from the best one.

    Args:
        main: what the rows are of.
        ranked: the rows that are ranked, a strategy and budget each.
        pairs: their comparisons.
        rows: all rows.
        budgets: the shares of dense MACs that were asked for.
    """
    asked = {key: float(entry.column("macs_ratio_asked")[0]) for key, entry in main.largest_entries.items()}
    dense = next((row for row in rows if row["strategy"] == DENSE), None)
    lines = [] if dense is None else [_line("1", [DENSE], dense, None)]
    for budget in budgets:
        at = [i for i, row in enumerate(ranked) if row["kind"] == "deployable" and asked[_key(row)] == budget]
        if not at:
            continue
        better = pairs.among(at).better()
        first = sorted((i for k, i in enumerate(at) if not better[:, k].any()), key=lambda i: -ranked[i]["accuracy"])
        inside = (row for row in rows if row["strategy"] == "random_inside" and asked.get(_key(row)) == budget)
        names = [ranked[i]["strategy"] for i in first]
        lines.append(_line(f"{budget:g}", names, ranked[first[0]], next(inside, None)))
    return lines


def _key(row: Row) -> Key:
    return row["strategy"], row["kind"], row["budget"]


def _line(budget: str, names: Sequence[str], top: Row, inside: Row | None) -> Row:
    return {
        "strategy": names[0],
        "kind": top["kind"],
        "budget": budget,
        "best": few(names, NAMED),
        "accuracy": _percent(top),
        "against_dense": _points(top, "accuracy_delta"),
        "speed_up": "" if top.get("speed_up") is None or names[0] == DENSE else f"{top['speed_up']:.2f}x",
        "random": "" if inside is None else _percent(inside),
        "against_random": "" if inside is None else _points(top, "random_inside_delta"),
    }


def _percent(row: Row) -> str:
    return "" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}"


def _points(row: Mapping[str, float | None], name: str) -> str:
    """Return a difference in points, with its interval where it has one."""
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    ends = [] if low is None or high is None else [low, high]
    shown = [f"{round(100 * x, 1) + 0.0:+.1f}" for x in (value, *ends)]  # no minus zero
    return shown[0] + (f" [{', '.join(shown[1:])}]" if ends else "")
