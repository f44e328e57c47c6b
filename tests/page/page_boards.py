"""Boards to make pages of."""

from typing import Any

from sparsebench.board.board import Board, Curve, Group, Row

KINDS = {"dense": "baseline", "random": "baseline", "oracle": "oracle"}
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
"""One pixel."""


def row(strategy: str, accuracy: float, **more: Any) -> Row:
    """Return one row of a board; what is not given is as in most of these tests."""
    kind = more.get("kind", KINDS.get(strategy, "deployable"))
    return {
        "rank": "not ranked" if kind == "oracle" else "1-2", "strategy": strategy, "kind": kind, "trained": "no",
        "budget": "macs 1" if strategy == "dense" else "macs 0.5",
        "macs_ratio": 1.0 if strategy == "dense" else 0.5, "accuracy": accuracy, "accuracy_low": accuracy - 0.01,
        "accuracy_high": accuracy + 0.01, "pareto": "no" if kind == "oracle" else "yes",
        "images_per_s": 1234.5, "device": "cpu", "n_seeds": 5,
    } | more  # fmt: skip


def board_of(rows: list[Row], **more: Any) -> Board:
    """Return a board of rows over all tasks, with a row a task besides, and a curve and two groups of each."""
    about = [{key: r[key] for key in ("strategy", "kind", "budget")} for r in rows]
    return Board(
        rows=rows,
        by_task=[{"task": task, "model": "vit", "n_train": 600} | r for task in ("composite", "theory") for r in rows],
        **{
            "notes": ["something to know"],
            "curves": [
                Curve(task="theory", model="vit", **one, sizes=(4, 8), rates=(0.0, 1.0), low=(0.0, 0.4),
                      high=(0.6, 1.0), n=(3, 3))
                for one in about
            ],
            "groups": [
                Group(task="composite", model="vit", **one, group=group, accuracy=0.5, low=None, high=None, n_seeds=1)
                for one in about
                for group in ("3 on china", "8 on flower")
            ],
            "bibtex": ["@article{one,\n title={A & B},\n}"],
            "environments": {"abc": {"python": "3.11", "torch": "2.9", "cores": "2"}},
            "suites": ["quick, version 1"],
            "pictures": {"tokens": PNG},
        }
        | more,
    )  # fmt: skip
