"""The choice of a schedule, by the distance from the outputs of the dense network."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured import value
from scipy.special import log_softmax

import sparsebench
from sparsebench import UserError
from sparsebench.measure.schedule import last_block
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.models.timm_models import create_vit
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner import run as runs
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.base import Data, Locations
from sparsebench.tasks.images import Composite
from sparsebench.training import evaluation
from sparsebench.training.schedules import FEW, choose, distances
from sparsebench.training.steps import Samples

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SMALL = "composite:test=60"
PLUGINS = ("divprune:schedule=auto", "random_inside:schedule=auto")


def records(out: Path, *plugins: str, jobs: int = 0, batch: int | None = None) -> dict[str, Record]:
    """Run strategies alone on an embedded network at 0.3 of the MACs; return their records by label."""
    request = Request(plugins=plugins, suite="embedded", tasks=(SMALL,), macs=(0.3,), seeds=1, alone=True)
    runs.run_missing(request, Files(), Execution("cpu", jobs=jobs, batch=batch), Registry(), out)
    return {record.label: record for record in store.read(out).values()}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    return records(tmp_path_factory.mktemp("auto"), *PLUGINS)


# Distances


def reference(dense: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """The divergences at the best of many temperatures, with plain loops."""
    best = None
    for temperature in np.exp(np.linspace(np.log(1 / 32), np.log(32), 2001)):
        p, q = log_softmax(dense, axis=1), log_softmax(outputs / temperature, axis=1)
        each = [sum(np.exp(p[i, k]) * (p[i, k] - q[i, k]) for k in range(p.shape[1])) for i in range(len(p))]
        if best is None or np.mean(each) < np.mean(best):
            best = each
    return np.array(best)


def test_the_divergence_is_that_at_the_best_temperature() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(3, 4)) * 3
    outputs = dense * 0.2 + rng.normal(size=(3, 4)) * 0.1
    assert distances(dense, outputs, classifies=True) == pytest.approx(reference(dense, outputs), abs=1e-4)


def test_surer_outputs_are_at_no_distance() -> None:
    dense = np.random.default_rng(1).normal(size=(20, 5))
    assert distances(dense, 4 * dense, classifies=True).max() < 1e-6
    assert distances(dense, -dense, classifies=True).mean() > 0.1


def test_features_are_compared_in_units_of_their_spread() -> None:
    rng = np.random.default_rng(2)
    dense, noise = rng.normal(size=(50, 6)), rng.normal(size=(50, 6))
    scale = np.array([1, 10, 100, 1e-3, 1, 1])
    plain = distances(dense, dense + noise, classifies=False)
    assert distances(scale * dense + 7, scale * (dense + noise) + 7, classifies=False) == pytest.approx(plain)
    assert plain == pytest.approx(((noise / dense.std(axis=0)) ** 2).mean(axis=1))


# The choice


def tiny_network() -> DeepViT:
    torch.manual_seed(0)
    vit = create_vit("test_vit", 64, 7)
    return DeepViT(vit.eval())


def samples_of(count: int) -> Samples:
    images = torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Samples(images, torch.zeros(count, dtype=torch.int64), None)


def test_labels_and_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    network, samples = tiny_network(), samples_of(48)
    strategy, budget = Registry().strategy("attn_topk").cls(), Budget(macs=0.5, schedule="auto")
    first = choose(network, strategy, budget, samples, samples.items, 3)
    samples.labels = torch.arange(48) % 7
    assert choose(network, strategy, budget, samples, samples.items, 3) == first
    monkeypatch.setattr(evaluation, "BATCH", 1)
    assert choose(network, strategy, budget, samples, samples.items, 3) == first


def test_all_are_compared_on_few_images_and_the_best_on_all() -> None:
    network, samples = tiny_network(), samples_of(FEW + 8)
    strategy = Registry().strategy("attn_topk").cls()
    choice = choose(network, strategy, Budget(macs=0.5, schedule="auto"), samples, samples.items, 3).choice
    images = [candidate.images for candidate in choice.candidates]
    assert sorted(images, reverse=True) == [FEW + 8] * 3 + [FEW] * (len(images) - 3)
    assert choice.candidates[choice.chosen].images == FEW + 8


def test_the_chosen_schedule_is_near_dense_and_used_in_the_test(chosen: dict[str, Record], tmp_path: Path) -> None:
    record = chosen["divprune"]
    assert record.schedule is not None
    best = record.schedule.best
    distances_ = [c.distance for c in record.schedule.candidates if c.images == best.images]
    assert best.distance is not None and best.distance <= min(d for d in distances_ if d is not None) + 0.05
    assert value(record, "macs_ratio") == pytest.approx(best.macs_ratio, abs=1e-3)
    acting = [step.tokens_out for step in record.trajectory]
    assert [acting[block] for block in best.blocks] == list(best.counts)
    plain = records(tmp_path, "divprune:macs=0.3")["divprune"]
    assert value(record, "accuracy") > value(plain, "accuracy") + 0.2


def test_other_labels_and_other_test_images_do_not_change_the_choice(
    chosen: dict[str, Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Composite.draw

    def other(self: Composite, n_train: int, repetition: int, locations: Locations) -> Data:
        data = draw(self, n_train, repetition, locations)
        test = draw(self, n_train, repetition + 1, locations).test
        train = replace(data.train, labels=np.roll(data.train.labels, 1))
        return replace(data, train=train, test=replace(test, labels=np.roll(test.labels, 1)))

    monkeypatch.setattr(Composite, "draw", other)
    changed = records(tmp_path, *PLUGINS)
    for label, record in chosen.items():
        assert changed[label].schedule == record.schedule
        assert changed[label].outcomes != record.outcomes


def test_workers_batches_and_company_do_not_change_a_record(chosen: dict[str, Record], tmp_path: Path) -> None:
    workers = records(tmp_path / "workers", *reversed(PLUGINS), jobs=2, batch=7)
    alone = records(tmp_path / "alone", PLUGINS[1])
    for record in (*workers.values(), *alone.values()):
        assert record.schedule == chosen[record.label].schedule
        assert record.outcomes == chosen[record.label].outcomes


def test_a_second_run_chooses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = records(tmp_path, "attn_topk:schedule=auto")
    monkeypatch.setattr("sparsebench.runner.prepare.choose", None)
    assert records(tmp_path, "attn_topk:schedule=auto")["attn_topk"].schedule == first["attn_topk"].schedule


def test_random_tokens_of_the_choice_are_not_those_of_the_test() -> None:
    network, samples = tiny_network(), samples_of(16)
    strategy, budget = Registry().strategy("random_inside").cls(), Budget(macs=0.5, schedule="auto")
    one = choose(network, strategy, budget, samples, samples.items, 1).choice
    two = choose(network, strategy, budget, samples, samples.items, 2).choice
    assert [c.distance for c in one.candidates] != [c.distance for c in two.candidates]


@pytest.mark.parametrize("plugin", ["patch_variance", "ats"])
def test_a_strategy_with_one_schedule_has_its_usual_cell(plugin: str, tmp_path: Path) -> None:
    (usual,) = records(tmp_path / "usual", plugin).values()
    (auto,) = records(tmp_path / "auto", f"{plugin}:schedule=auto").values()
    assert auto.cell == usual.cell and auto.schedule is None


def test_a_schedule_is_not_chosen_on_a_network_that_is_still_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"suite": "quick-scratch", "tasks": "composite:test=20", "n_train": 20, "jobs": 0}
    with pytest.raises(UserError, match="trained network") as error:
        sparsebench.run(plugins="attn_topk:schedule=auto", out=tmp_path, **options)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", ["keep_rate=0.5", "per_block=3", "macs=0.5,blocks=1", "macs=0.5,gamma=3"])
def test_a_schedule_is_chosen_for_a_share_of_the_macs_alone(budget: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="schedule"):
        sparsebench.run(plugins=f"attn_topk:{budget},schedule=auto", tasks=SMALL, suite="embedded", out=tmp_path)


@pytest.mark.parametrize(("block", "changes"), [(5, False), (4, True)])
def test_a_class_token_is_not_changed_by_choices_after_the_last_attention(block: int, changes: bool) -> None:
    network, samples = tiny_network(), samples_of(2)
    strategy = Registry().strategy("attn_topk").cls()
    assert last_block(strategy.traits(), network.cost) == 4
    actor = Actor(strategy, Budget(counts=(3,), blocks=(block,)), network.cost, network.grid, 0)
    with torch.no_grad():
        outputs, _ = samples.forward(network, actor, samples.items, visit=0, training=False)
        dense, _ = samples.forward(network, None, samples.items, visit=0, training=False)
    assert torch.allclose(outputs, dense, atol=1e-5) != changes
