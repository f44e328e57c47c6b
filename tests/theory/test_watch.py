import copy
import math

import numpy as np
import pytest
import torch
from running import inline
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.network import ShallowViT
from sparsebench_theory.shallow.task import Theory

from sparsebench.models.actor import Actor
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, Part
from sparsebench.strategy.budget import FULL, Budget
from sparsebench.training.evaluation import evaluate
from sparsebench.training.loop import Training, Watch
from sparsebench.training.steps import Samples

TASK = Theory(tokens=20, relevant=0.4, confusion=0.1, batch=8, test=12, steps=25, watch=10)
DATA = TASK.draw(20, 0, {})
SHAPES = [{}, {"heads": 2, "skip": True}]
STRATEGIES = [None, Random(), Oracle(), AttnTopK()]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=["plain", "variant"])
strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=["dense", "random", "oracle", "attn_topk"])


def samples_of(split):
    return Samples(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)))


class Trial:
    """A network in training, watched if the task has `watch`."""

    def __init__(self, shape, strategy=None, task=TASK, engine=None, tested=True):
        self.task, self.recipe = task, task.recipe()
        self.network = Shallow(m=64, **shape).build(DATA, 0)
        self.actor = strategy and Actor(strategy, Budget(keep_rate=0.5), self.network.cost, None, 3)
        given = self.network, self.actor, samples_of(DATA.train), self.recipe
        self.training = Training(*given, ("order",), steps=engine and engine(*given))
        self.steps = self.training.steps
        self.tested, self.test = self.actor if tested else None, samples_of(DATA.test)
        self.watch = Watch(self.training, self.tested, self.test) if task.watch else None

    def run(self, on_step=None):
        self.done = self.training.run(on_step or self.watch)
        return self

    def evaluate(self):
        self.steps.store()
        return evaluate(copy.deepcopy(self.network), self.tested, self.test, self.recipe)

    def weights(self):
        return [p.detach().clone() for p in self.network.parameters()]


def brute_force_mass(network, X, relevance, kept):
    """Return the mean attention on relevant tokens over samples, heads and kept tokens, by loops in float64."""
    shares = []
    for x, relevant, S in zip(X.double().numpy(), relevance.numpy(), kept, strict=True):
        tokens = np.flatnonzero(S)
        for W_Q, W_K in zip(network.W_Q.detach().double().numpy(), network.W_K.detach().double().numpy(), strict=True):
            for l in tokens:
                e = {s: math.exp((W_K @ x[s]) @ (W_Q @ x[l])) for s in tokens}
                shares.append(sum(e[s] for s in tokens if relevant[s]) / sum(e.values()))
    return np.mean(shares)


@shapes
@strategies
def test_each_look_sees_the_loss_and_the_attention_of_its_step(shape, strategy):
    trial, expected = Trial(shape, strategy), []

    def on_step(step):
        trial.watch(step)
        if step in (0, 10, 20):
            result = trial.evaluate()
            mass = brute_force_mass(trial.network, trial.test.inputs, trial.test.relevance, result.kept)
            expected.append((result.loss, mass))

    trial.run(on_step)
    assert trial.watch.looks == [0, 10, 20]
    losses, masses = (trial.watch.seen[name] for name in ("test_loss", "attention_on_relevant"))
    np.testing.assert_allclose(np.transpose([losses, masses]), expected, rtol=1e-5)
    assert losses[0] > losses[2] and masses[0] != masses[2]
    for _ in range(2):  # the last step is measured once, on request
        trial.watch.measure(25)
    assert trial.watch.looks == [0, 10, 20, 25] and len(losses) == 4


@shapes
@strategies
def test_watching_changes_no_bit(shape, strategy, watch=3):
    plain = Trial(shape, strategy, TASK.model_copy(update={"watch": 0})).run()
    watched = Trial(shape, strategy, TASK.model_copy(update={"watch": watch})).run()
    assert plain.done == watched.done
    assert all(torch.equal(*pair) for pair in zip(plain.weights(), watched.weights(), strict=True))
    assert watched.network.training == plain.network.training


def test_the_test_is_watched_without_the_strategy_where_that_trains_only():
    trial = Trial({}, Random(), tested=False).run()
    trial.watch.measure(25)
    result = trial.evaluate()
    assert result.kept.all() and trial.watch.seen["test_loss"][-1] == pytest.approx(result.loss, rel=1e-5)
    everything = np.ones((12, 20))
    mass = brute_force_mass(trial.network, trial.test.inputs, trial.test.relevance, everything)
    assert trial.watch.seen["attention_on_relevant"][-1] == pytest.approx(mass, rel=1e-5)


@shapes
def test_the_strategy_is_told_that_it_is_watched_in_a_test(scripted, shape):
    told = []
    trial = Trial(shape, scripted(lambda view, keep: told.append(view.training), budgeted=False))
    told.clear()
    trial.watch.measure(0)
    assert told and not any(told)


@pytest.mark.parametrize(
    ("losses", "expected"), [([1.0, 0.5, 1e-3], None), ([1.0, 5e-4, 1e-2], 10), ([1e-4, 1.0, 0.0], 0), ([], None)]
)
def test_iterations_are_the_first_look_below_the_threshold(losses, expected):
    watch = Trial({}).watch
    watch.looks, watch.seen = [0, 10, 20][: len(losses)], {"test_loss": losses, "test_accuracy": [0.0] * len(losses)}
    assert watch.iterations(TASK.success) == expected


def record_of(tmp_path, plugin="dense", n_train=20, **task):
    registry = Registry()
    result = registry.strategy(plugin)
    cell = Cell(
        task=Part.of(TASK.model_copy(update=task)), model=Part(name="shallow", params={"m": 64}),
        strategy=Part.of(result.cls()), budget=FULL if plugin == "dense" else Budget(keep_rate=0.5), n_train=n_train,
        repetition=0,
    )  # fmt: skip
    job = Job(cell=cell, origin=result.origin, kind=result.cls.kind, label=plugin)
    (record,) = inline([job], registry, tmp_path)
    return record


WATCHED = ("watched_steps", "watched_test_loss", "watched_attention_on_relevant", "watched_test_accuracy")


@pytest.mark.parametrize("plugin", ["dense", "attn_topk"])
def test_a_record_has_what_was_watched(tmp_path, plugin):
    """A record has what was watched to the last step and else is the same."""
    record, plain = record_of(tmp_path, plugin), record_of(tmp_path, plugin, watch=0)
    assert record.status == "ok", record.failure
    at, losses, masses, _ = (record.samples[name] for name in WATCHED)
    assert at == (0, 10, 20, 25) and len(losses) == len(masses) == 4
    assert record.metrics["steps"].value == 25
    assert losses[-1] == pytest.approx(record.metrics["test_loss"].value, rel=1e-5)
    attention, iterations = (record.metrics[name] for name in ("attention_on_relevant", "iterations"))
    assert (attention.value, attention.unit, attention.n) == (masses[-1], "fraction", 12)
    assert (iterations.value, iterations.unit) == (None, "steps")
    assert plain.samples == {} and {name for name in record.samples if name.startswith("watched")} == set(WATCHED)
    assert {"attention_on_relevant", "iterations"} == set(record.metrics) - set(plain.metrics)
    assert all(record.metrics[name] == metric for name, metric in plain.metrics.items())
    assert record.outcomes == plain.outcomes


def test_a_record_says_when_the_loss_fell_below_the_threshold(tmp_path):
    """A record says when the test loss fell below the threshold and the looks end with the training."""
    record = record_of(tmp_path, steps=600, watch=7, threshold=0.05, n_train=64)
    at, losses, *_ = (record.samples[name] for name in WATCHED)
    steps = record.metrics["steps"].value
    assert steps is not None and steps < 600 and at == (*range(0, math.ceil(steps), 7), steps)
    first = next(step for step, loss in zip(at, losses, strict=True) if loss < 0.05)
    assert record.metrics["iterations"].value == first > 0
    assert record.metrics["success"].value == 1


def test_only_a_model_that_shows_itself_can_be_watched(tmp_path, monkeypatch):
    monkeypatch.delattr(ShallowViT, "observe")
    assert record_of(tmp_path, watch=0).status == "ok"
    record = record_of(tmp_path)
    assert record.status == "unsupported" and record.failure is not None
    assert "watch=... is for networks that have `observe`" in record.failure.reason


def test_a_watched_training_that_diverges_is_a_failure(tmp_path):
    record = record_of(tmp_path, lr=1e30)
    assert record.status == "failed" and record.failure is not None and "diverged" in record.failure.reason
