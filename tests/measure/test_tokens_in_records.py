"""Results of single tokens in records."""

from pathlib import Path
from typing import Any

import pytest
from measured import COMPOSITE, VIT, Measure

from sparsebench.records import store
from sparsebench.records.record import Record, canonical

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


@pytest.fixture(scope="session")
def image(measured: Measure) -> Measure:
    """Return a function that returns the record of a plugin's cell on the composite task."""

    def measure(plugin: str, task: str = COMPOSITE, **options: Any) -> Record:
        return measured(plugin, task, 40, model=VIT, **options)

    return measure


BY_BLOCK = [f"selection_{name}" for name in ("blocks", "precision_by_block", "recall_by_block", "auroc_by_block")]


def test_selection_is_recorded_block_by_block(image: Measure, measured: Measure) -> None:
    record = image("attn_topk:keep_rate=0.5")
    blocks, precision, recall, auroc = (record.samples[name] for name in BY_BLOCK)
    assert blocks == (1, 2) and len(precision) == len(recall) == len(auroc) == 2
    assert [precision[1], recall[1]] == [record.metrics[f"selection_{name}"].value for name in ("precision", "recall")]
    assert auroc[0] == record.metrics["selection_auroc"].value and auroc[0] != auroc[1]
    assert recall[0] > recall[1]  # removed tokens do not return
    assert not set(BY_BLOCK) & set(image("dense").samples)
    assert not set(BY_BLOCK) & set(measured("random").samples)  # a network with one block needs no values by block


INNER_ORACLE = """
import sparsebench

class Inner(sparsebench.Strategy):
    name, kind, site, needs = "inner", "oracle", "block", frozenset({"relevance"})

    def scores(self, view):
        return view.relevance

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Inner]
"""


def test_without_tokens_of_both_kinds_there_is_no_auroc(image: Measure, tmp_path: Path) -> None:
    path = tmp_path / "inner.py"
    path.write_text(INNER_ORACLE)
    record = image(f"{path}:keep_rate=0.25")
    assert [record.samples[name] for name in BY_BLOCK[1::2]] == [(1, 1), (1, None)]
    assert record.samples[BY_BLOCK[2]][0] > record.samples[BY_BLOCK[2]][1] > 0
    assert store.parse(canonical(record.model_dump(mode="json")).encode()) == record


INDICES = ("a_tsi", "m_tsi", "a_tsi_dense", "m_tsi_dense")
MEASURED = COMPOSITE + ",spuriosity=40"


def test_token_spuriosity_is_measured_only_on_request(image: Measure) -> None:
    """The spuriosity of tokens is measured where asked for and changes nothing else."""
    for plugin in ("dense", "random", "attn_topk"):
        plain, record = image(plugin), image(plugin, MEASURED)
        assert record.status == "ok", record.failure
        assert set(record.metrics) - set(plain.metrics) == set(INDICES)
        assert record.outcomes == plain.outcomes and record.metrics["train_loss"] == plain.metrics["train_loss"]
        assert all(record.metrics[name].unit == "ratio" for name in INDICES)
        right = round(40 * (record.metrics["accuracy"].value or 0))
        assert 0 < record.metrics["a_tsi"].n == record.metrics["m_tsi"].n == right < 40
        after, before = ([record.metrics[name].value for name in names] for names in (INDICES[:2], INDICES[2:]))
        assert all(value is not None and value > 0 for value in before + after)
        assert (after == before) == (plugin == "dense")


def test_where_nothing_acts_in_the_test_both_spuriosities_are_one(image: Measure) -> None:
    metrics = image("random", MEASURED, where="train").metrics
    assert metrics["a_tsi"] == metrics["a_tsi_dense"] and metrics["m_tsi"] == metrics["m_tsi_dense"]


def test_spuriosity_is_not_measured_where_tokens_are_merged(image: Measure) -> None:
    record = image("tome:keep_rate=0.5", MEASURED)
    assert [record.metrics[name].value is None for name in INDICES] == [True, True, False, False]
    assert "merged" in record.notes["spuriosity"]
