"""Flat records of a few strategies, with the outcomes of their test items."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparsebench.board.columns import Row, dicts
from sparsebench.board.judge import judge
from sparsebench.board.reading import Flats
from sparsebench.records import store, table
from sparsebench.records.record import Record, bytes_of
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import label

KINDS = {
    "dense": "baseline",
    "random": "baseline",
    "random_inside": "baseline",
    "oracle": "oracle",
    "anti_oracle": "oracle",
}
Flat = dict[str, Any]


def flatten(record: Record) -> Flat:
    """Return a record as a flat row, the input of boards."""
    (row,) = table.rows_of(table.table_of([(record, 0)]))
    return row


def build(records: Flats, by: str | None = None) -> list[Row]:
    """Return the rows of the leaderboard of records."""
    return dicts(judge(records, by).rows)


def rows_in(out: Path) -> list[Flat]:
    """Return the flat rows of a folder's current records."""
    return list(table.rows_of(store.rows(out).sort_by("cell_id")))


def filled(out: Path, *records: Record) -> Path:
    """Append records to a segment of a folder, and return the folder."""
    writer = store.Writer(out)
    for record in records:
        writer.append(record)
    writer.close()
    return out


def copy_without(out: Path, to: Path, cells: Sequence[str]) -> Path:
    """Copy a folder without the records of some cells, and return the copy."""
    rows = store.rows(out)
    kept = pc.invert(pc.is_in(rows["cell_id"], pa.array(cells, pa.string())))
    table.write(to / "records" / "some.parquet", rows.filter(kept), store.sidecars(out, *store.SIDECARS))
    return to


def flat(strategy: str, seed: int = 0, task: str = "composite", **more: Any) -> Flat:
    """Return one flat record; the defaults are those of most tests."""
    return {
        "cell_id": f"{task} {strategy} {seed}", "status": "ok", "reason": "", "task": task, "model": "vit",
        "strategy": strategy, "kind": KINDS.get(strategy, "deployable"),
        "budget": "macs 1" if strategy == "dense" else "macs 0.5", "n_train": 600, "repetition": seed,
        "setting": f"setting of {task}", "device": "cpu", "started": "2026-01-01T00:00:00+00:00", "seconds": 1.0,
    } | more  # fmt: skip


def called(name: str, **params: Any) -> Flat:
    """Return the columns of a strategy with parameters that differ from their defaults."""
    return {"strategy": label(name, params), "strategy_name": name, "strategy_params": json.dumps(params)}


def budgeted(budget: Budget) -> Flat:
    """Return the columns of a budget."""
    return {"budget": budget.label, "budget_amount": budget.amount, "budget_value": budget.value,
            "budget_rounding": budget.rounding, "budget_places": budget.places, "budget_where": "both"}  # fmt: skip


def in_blocks(macs: float, *blocks: int) -> Flat:
    """Return the columns of a share of the dense MACs at which tokens leave in these blocks."""
    return budgeted(Budget(macs=macs, blocks=blocks))


def seeded(strategy: str, values: list[float], metric: str = "accuracy", **more: Any) -> list[Flat]:
    return [flat(strategy, seed, **{metric: value}, **more) for seed, value in enumerate(values)]


def trials(strategy: str, *successes: str, **more: Any) -> list[Flat]:
    """Return theory records for 4, 8, ... training samples from a string of 0 and 1 (success) for each repetition."""
    return [
        flat(strategy, seed, "theory", n_train=4 * 2**j, success=float(x), accuracy=0.5 + float(x) / 2, **more)
        for seed, word in enumerate(successes)
        for j, x in enumerate(word)
    ]


def gaps(strategy: str, values: list[float], **more: Any) -> list[Flat]:
    return [
        flat(strategy, seed, "spurious", spurious_gap=value, worst_group_accuracy=0.9 - value, accuracy=0.9, **more)
        for seed, value in enumerate(values)
    ]


def row_of(rows: list[Row], strategy: str, **more: Any) -> Row:
    (row,) = (r for r in rows if r["strategy"] == strategy and all(r[k] == v for k, v in more.items()))
    return row


WHOLE = [
    *seeded("dense", [0.8, 0.9, 0.7], macs_ratio=1.0, images_per_s=100.0, selection_auroc=0.5),
    *seeded("mine", [0.82, 0.91, 0.75], macs_ratio=0.5, images_per_s=190.0, selection_auroc=0.9),
    *seeded("random", [0.6, 0.7, 0.5], macs_ratio=0.5, images_per_s=200.0, selection_auroc=0.5),
    *seeded("oracle", [0.95, 0.96, 0.97], macs_ratio=0.5, images_per_s=200.0, selection_auroc=1.0),
    *trials("dense", "001", "001", "011"),
    *trials("mine", "011", "001", "111"),
    *trials("random", "000", "000", "001"),
    *trials("oracle", "111", "111", "111"),
    *gaps("dense", [0.3, 0.4, 0.5]),
    *gaps("mine", [0.2, 0.4, 0.3]),
    *gaps("random", [0.5, 0.4, 0.5]),
    *gaps("oracle", [0.1, 0.0, 0.1]),
]


def with_outcomes(strategy: str, hits: np.ndarray, groups: np.ndarray | None = None, **more: Any) -> list[Flat]:
    """Return flat records with (S, I) outcomes, 1 for a correct item, and the groups of the items if any."""
    S, I = hits.shape
    labels = [np.arange(I) % 2 + 2 * seed for seed in range(S)]
    packed = [{} if groups is None else {"test_groups": bytes_of(groups)} for _ in range(S)]
    return [
        flat(strategy, seed, accuracy=float(right.mean()), test_items=I, test_labels=bytes_of(labels[seed]),
             test_predictions=bytes_of(np.where(right, labels[seed], 60000)), **packed[seed] | more)
        for seed, right in enumerate(hits)
    ]  # fmt: skip


def of_items(strategy: str, seed: int, asked: float, rate: float, I: int = 600, **more: Any) -> Flat:
    """Return the flat record of one test at a share of the dense MACs; easy items are correct."""
    hard = np.random.default_rng(seed).random(I)
    hits = hard + np.random.default_rng([seed, int(1000 * asked), *strategy.encode()]).normal(0, 0.05, I) < rate
    labels = np.arange(I) % 2 + 2 * seed
    about = {
        "cell_id": f"{strategy} {asked} {seed} {more.get('task')} {more.get('track')}", "budget": f"macs {asked:g}",
        "macs_ratio": asked, "macs_ratio_asked": asked, "accuracy": hits.mean(), "test_items": I,
        "test_labels": bytes_of(labels), "test_predictions": bytes_of(np.where(hits, labels, 60000)),
    }  # fmt: skip
    return flat(strategy, seed) | about | more


def drawn(rate: float, seed: int, I: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).random((3, I)) < rate
