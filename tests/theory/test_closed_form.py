import copy
import hashlib
import importlib.util
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import inline, local
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.noise import Noise
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow import closed_form, kernels
from sparsebench_theory.shallow.closed_form import ClosedForm
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT
from sparsebench_theory.shallow.task import Theory

from sparsebench.errors import DivergedError
from sparsebench.models.actor import Actor
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, Part, Record
from sparsebench.records.store import weights_path
from sparsebench.strategy.budget import FULL, Budget
from sparsebench.strategy.plans import Keep
from sparsebench.tasks.base import Recipe
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples

MATRICES = ("W_Q", "W_K", "W_V", "W_O")
SGD = Recipe("hinge", "sgd", lr=0.5, batch=4, epochs=10**9, steps=12, fixed_selection=True)
"""The last batch of a pass over 10 samples is smaller."""


def problem(d, tokens, m, n, *, hinge="some", seed=0, dtype=torch.float64, **variant):
    """Return a network and n samples of which all, some (of a single one, none) or none have a loss."""
    rng = np.random.default_rng((d, tokens, m, n, seed))
    patterns = np.linalg.qr(rng.standard_normal((d, d)))[0][:, :3]
    network = ShallowViT(rng, patterns, tokens, m=m, first=FirstWeights(0.3, 0.5, 0.5), **variant).to(dtype)
    X = torch.from_numpy(rng.standard_normal((n, tokens, d))).to(dtype)
    relevance = torch.from_numpy((rng.random((n, tokens)) < 0.4).astype(np.float32))
    with torch.no_grad():
        F = network(X)
        margins = F.abs().clamp(min=1e-3).sort().values
        network.W_O *= {"all": 0.5 / margins[-1], "some": 1.2 / margins[n // 2], "none": 1.2 / margins[0]}[hinge]
    labels = (F > 0).long()
    if hinge == "some" and n > 1:
        labels[F.abs().argmin()] ^= 1
    return network, Samples(X, labels, relevance)


def actor_of(strategy, network, rate=0.5):
    return Actor(strategy, Budget(keep_rate=rate), network.cost, None, 3)


def both(network, strategy, samples, recipe=SGD):
    """Return the closed form, and Autograd on a network with the same weights."""
    result = []
    for kind in (ClosedForm, Autograd):
        own = copy.deepcopy(network)
        result.append(kind(own, strategy and actor_of(strategy, own), samples, recipe))
    return result


def weights(network):
    return {name: getattr(network, name).detach().clone() for name in MATRICES}


def assert_close(network, reference, start, limit):
    """Compare the changes by the steps for each matrix, in the Frobenius norm, up to the rounding of the weights."""
    for name, first in start.items():
        one, other = (getattr(net, name).detach() for net in (network, reference))
        change = (other - first).norm()
        assert (one - other).norm() <= limit * change + 2e-14 * first.norm(), name


def compare_one_step(network, samples, rows, recipe=SGD, limit=1e-12):
    start = weights(network)
    exact, reference = both(network, None, samples, recipe)
    loss, expected = exact.step(rows, 0, 0.0), float(reference.step(rows, 0, 0.0))
    assert all(torch.equal(getattr(exact.network, name), start[name]) for name in MATRICES)  # until `store`
    exact.store()
    assert loss == pytest.approx(expected, rel=1e-12)
    assert_close(exact.network, reference.network, start, limit)
    return start, exact.network


WIDE = pytest.mark.slow  # another width is compiled, which takes long


@pytest.mark.parametrize(
    ("d", "tokens", "m", "n"),
    [
        (6, 7, 3, 1), (6, 33, 257, 5), (6, 65, 600, 3), (6, 1, 9, 2), (6, 4, 255, 1), (6, 31, 513, 3), (6, 32, 700, 3),
        *(pytest.param(*shape, marks=WIDE) for shape in ((5, 16, 256, 2), (10, 50, 300, 20), (10, 2, 1000, 2))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hinge", ["all", "some"])
@pytest.mark.parametrize("attention", ["trained", "frozen"])
def test_a_step_is_autograds(d, tokens, m, n, hinge, attention):
    """Includes neurons at zero, which stay zero, and tokens of zeros. Padding stays 0."""
    network, samples = problem(d, tokens, m, n, hinge=hinge if n > 1 else "all", attention=attention)
    with torch.no_grad():
        network.W_O[::3] = 0
    samples.inputs[0, 0] = 0
    start, after = compare_one_step(network, samples, np.random.default_rng(1).permutation(n))
    moved = [name for name in MATRICES if not torch.equal(getattr(after, name), start[name])]
    assert tokens == 1 or moved == [*MATRICES][2 * (attention == "frozen") :]
    assert (after.W_O[::3] == 0).all()


@given(
    st.integers(1, 40), st.integers(1, 600), st.integers(1, 8), st.booleans(), st.sampled_from(["all", "some"]),
    st.integers(0, 2**32 - 1), st.data(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_step_is_autograds_whatever_the_shape_and_the_batch(tokens, m, n, frozen, hinge, seed, data):
    variant = {"attention": "frozen" if frozen else "trained"}
    network, samples = problem(6, tokens, m, n, hinge=hinge, seed=seed, **variant)
    rows = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    # A change may be a small difference of large gradients, which its norm does not show.
    compare_one_step(network, samples, np.array(rows), limit=1e-10)


TYPES = pytest.mark.parametrize(("d", "dtype"), [(6, torch.float64), (10, torch.float32)])


@TYPES
def test_samples_without_a_loss_change_nothing(d, dtype):
    network, samples = problem(d, 19, 300, 10, hinge="none", dtype=dtype)
    start = weights(network)
    exact = ClosedForm(network, None, samples, SGD)
    assert [exact.step(rows, 0, 0.0) for rows in (np.arange(10), np.array([3]))] == [0.0, 0.0]
    assert (exact.losses() == 0).all()
    exact.store()
    assert all(torch.equal(getattr(network, name), start[name]) for name in MATRICES)


def theory(m=256, n=40, dtype=torch.float32, model=None, **task):
    task = Theory(test=20, **task)
    data = task.draw(n, 0, {})
    network = Shallow(m=m, **(model or {})).build(data, 0)
    split = data.train
    inputs, labels, relevance = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    return task.recipe(), network.to(dtype), Samples(inputs.to(dtype), labels, relevance)


def run(engine, recipe, n, **changes):
    own = engine.network, None, engine.samples, replace(recipe, **changes)
    return Training(*own, ("order", 0), steps=engine).run()


def test_single_precision_stays_near_double_precision():
    recipe, network, samples = theory()
    wide, wide_samples = copy.deepcopy(network).double(), copy.deepcopy(samples)
    wide_samples.inputs = samples.inputs.double()
    for kind, net, data in ((ClosedForm, network, samples), (Autograd, wide, wide_samples)):
        run(kind(net, None, data, recipe), recipe, 40, steps=20)
    for name in MATRICES:
        exact = getattr(wide, name).detach()
        assert (getattr(network, name).detach().double() - exact).norm() <= 1e-4 * exact.norm(), name
    network, X = network.double(), wide_samples.inputs
    with torch.no_grad():
        active = [((net.attention(X) @ net._by_head(X, net.W_V))[:, 0] @ net.W_O.T > 0) for net in (network, wide)]
    assert 0.1 < float(active[0].double().mean()) < 0.9
    assert float((active[0] != active[1]).double().mean()) < 1e-3


def test_single_precision_has_an_exponential_to_the_last_bits():
    x = np.concatenate([np.linspace(-87, 0, 10**6), -np.geomspace(1e-38, 87, 10**4)]).astype(np.float32)
    result = x.copy()
    kernels._exp(result, np.zeros(x.size, np.int32), x.size)
    assert np.max(np.abs(result / np.exp(x.astype(float)) - 1)) < 2e-7
    rare = np.array([0, -88, -1e30, -np.inf, np.nan], np.float32)
    kernels._exp(rare, np.zeros(5, np.int32), 5)
    assert rare[0] == 1 and (rare[1:4] < 2e-38).all() and np.isnan(rare[4])


def test_scores_of_hundreds_are_no_trouble():
    network, samples = problem(10, 20, 64, 5, hinge="all", dtype=torch.float32)
    with torch.no_grad():
        network.W_Q *= 400
        expected = copy.deepcopy(network).double()(samples.inputs.double())
    result = ClosedForm(network, None, samples, SGD).losses()
    signs = 2 * samples.labels.numpy() - 1
    np.testing.assert_allclose(result, np.maximum(1 - signs * expected.numpy(), 0), atol=2e-3)


@pytest.mark.parametrize("strategy", [Random(), Oracle(), Noise(), AttnTopK(), None])
@pytest.mark.parametrize(("d", "tokens", "m"), [(6, 11, 70), (6, 37, 300)])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("repacked", [False, True])
def test_steps_with_removed_tokens_are_autograds(strategy, d, tokens, m, fixed, repacked):
    network, samples = problem(d, tokens, m, 10, repacked=repacked)
    start, recipe = weights(network), replace(SGD, fixed_selection=fixed, lr=0.05)
    exact, reference = both(network, strategy, samples, recipe)
    told = [run(steps, recipe, 10) for steps in (exact, reference)]
    assert told[0] == pytest.approx(told[1], rel=1e-9)
    assert_close(exact.network, reference.network, start, 1e-10)


@pytest.mark.parametrize("need", ["queries", "keys", "values", "received_attention"])
def test_a_choice_by_weights_is_made_in_each_step(scripted, need):
    """A choice by the weights is made in each step from the current ones."""
    seen = []

    def decide(view, keep):
        given = getattr(view, need)
        seen.append(given.clone())
        return Keep.top(given if given.ndim == 2 else given.sum(dim=(1, 3)), keep)

    network, samples = problem(6, 9, 20, 10)
    for steps in both(network, scripted(decide, site="attention", needs=(need,)), samples):
        run(steps, SGD, 10)
    assert len(seen) == 24
    for one, other in zip(seen[:12], seen[12:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert not any(one.shape == other.shape and torch.equal(one, other) for one, other in pairwise(seen[:12]))


def test_a_strategy_that_removes_nothing_changes_no_bit(scripted):
    result = []
    for strategy, rate in ((None, 1.0), (Random(), 1.0), (scripted(lambda view, keep: None, budgeted=False), 0.5)):
        network, samples = problem(6, 9, 20, 10)
        actor = strategy and actor_of(strategy, network, rate)
        run(ClosedForm(network, actor, samples, SGD), SGD, 10)
        result.append(weights(network))
    assert all(torch.equal(result[0][name], other[name]) for other in result for name in MATRICES)


@pytest.mark.parametrize("strategy", [None, Random(), AttnTopK()])
@pytest.mark.parametrize("shape", [(6, 7, 3, 4), (6, 34, 300, 5)])
@pytest.mark.parametrize("repacked", [False, True])
def test_losses_are_the_hinge_of_the_forward_pass(strategy, shape, repacked):
    network, samples = problem(*shape, repacked=repacked)
    start = weights(network)
    exact, reference = both(network, strategy, samples)
    with torch.no_grad():
        F, _ = samples.forward(network, reference.actor, samples.items, visit=0, training=False)
    expected = torch.relu(1 - (2 * samples.labels - 1) * F)
    np.testing.assert_allclose(exact.losses(), expected.numpy(), rtol=1e-12, atol=1e-13)
    exact.store()
    assert all(torch.equal(getattr(exact.network, name), start[name]) for name in MATRICES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", MATRICES)
@TYPES
def test_weights_that_are_no_numbers_never_have_no_loss(bad, name, d, dtype):
    network, samples = problem(d, 9, 20, 4, dtype=dtype)
    with torch.no_grad():
        getattr(network, name).view(-1)[7] = bad
    exact = ClosedForm(network, None, samples, SGD)
    assert not math.isfinite(exact.step(np.arange(4), 0, 0.0))
    with pytest.raises(DivergedError, match="the loss of pass 1 is"):
        run(ClosedForm(network, None, samples, SGD), SGD, 4, stop_at_zero_loss=True)


@pytest.mark.parametrize("label", [0, 1])
@TYPES
def test_an_infinite_output_is_divergence_and_not_a_large_margin(label, d, dtype):
    network, samples = problem(d, 9, 1, 1, dtype=dtype)
    samples.inputs.abs_()
    samples.labels[:] = label
    with torch.no_grad():
        network.W_V[0] = torch.eye(d)
        network.W_O[:] = torch.finfo(dtype).max / 2
        network.a[:] = 1 if label else -1
        assert not network(samples.inputs).isfinite().any()
    with pytest.raises(DivergedError):
        run(ClosedForm(network, None, samples, SGD), SGD, 1, stop_at_zero_loss=True)


def job(repetition=0, plugin="dense", n_train=20, keep_weights=True, **task):
    task = Theory(**{"tokens": 20, "steps": 60, "test": 20} | task)
    result = Registry().strategy(plugin)
    cell = Cell(
        task=Part.of(task), model=Part.of(Shallow(m=64)), strategy=Part.of(result.cls()),
        budget=FULL if plugin == "dense" else Budget(keep_rate=0.5), n_train=n_train, repetition=repetition,
    )  # fmt: skip
    return Job(cell=cell, origin=result.origin, kind=result.cls.kind, label=plugin, keep_weights=keep_weights)


@pytest.mark.parametrize("lr", [1e8, 1e20, 1e38])
@pytest.mark.parametrize("plugin", ["dense", "attn_topk"])
def test_a_step_size_that_is_too_large_fails(tmp_path, lr, plugin):
    (record,) = inline([job(lr=lr, keep_weights=False, plugin=plugin)], Registry(), tmp_path)
    assert record.status == "failed" and record.failure is not None
    assert record.failure.kind == "DivergedError" and "training diverged" in record.failure.reason


def what_was_measured(records, out):
    """Return by cell the record without the data of the run, and the bytes of the weights."""
    result = {}
    for record in records:
        assert isinstance(record, Record) and record.status == "ok", record.failure
        result[record.cell_id] = (
            record.model_dump(exclude={"started", "seconds", "memory"}), weights_path(out, record.cell_id).read_bytes()
        )  # fmt: skip
    return result


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """Return jobs, one of them watched, and their results when run one after the other in this process."""
    jobs = [job(k, plugin) for plugin in ("dense", "random", "attn_topk") for k in range(2)]
    jobs[1], out = job(1, watch=7, tokens=33), tmp_path_factory.mktemp("together")
    return jobs, what_was_measured(inline(jobs, Registry(), out), out)


def test_a_trial_has_the_same_bits_whatever_was_trained_before_it(trials, tmp_path):
    jobs, together = trials
    assert what_was_measured(inline(jobs[::-1], Registry(), tmp_path), tmp_path) == together
    alone = what_was_measured(inline(jobs[2:3], Registry(), tmp_path), tmp_path)
    assert alone.items() <= together.items()
    assert len({weights for _, weights in together.values()}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_has_the_same_bits_in_any_number_of_worker_processes(trials, tmp_path, workers):
    jobs, together = trials
    assert what_was_measured(local(jobs, workers, tmp_path), tmp_path) == together


def fingerprint():
    """Return a hash of the weights and the losses of a few short trainings."""
    result = hashlib.sha256()
    for strategy in (None, Random(), Oracle()):
        recipe, network, samples = theory(m=300, n=30, tokens=33)
        steps = ClosedForm(network, strategy and actor_of(strategy, network), samples, recipe)
        done = run(steps, recipe, 30, steps=40)
        result.update(repr(done).encode() + steps.losses().tobytes())
        for value in weights(network).values():
            result.update(value.numpy().tobytes())
    return result.hexdigest()


def fingerprint_elsewhere(**environment):
    """Return the fingerprint computed by a new process."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", "import test_closed_form as t; print(t.fingerprint())"]
    told = subprocess.run(
        command, env=os.environ | environment | {"PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_bits_are_those_of_a_fresh_process_with_any_number_of_threads(threads):
    names = ("OMP", "MKL", "OPENBLAS", "NUMBA")
    assert fingerprint_elsewhere(**{f"{name}_NUM_THREADS": threads for name in names}) == fingerprint()


@pytest.mark.slow
def test_the_bits_are_the_same_just_compiled_and_read_from_the_disk(tmp_path):
    result = [fingerprint_elsewhere(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert any(tmp_path.rglob("*.nbc")) and result == [fingerprint()] * 2


@pytest.mark.parametrize(
    ("variant", "change"),
    [({"heads": 2}, {}), ({"skip": True}, {}), ({"outputs": 2}, {}), ({}, {"loss": "cross-entropy"}),
     ({}, {"optimizer": "adamw"})],
)  # fmt: skip
def test_other_networks_losses_and_optimisers_are_left_to_autograd(variant, change):
    network, samples = problem(6, 7, 3, 2)
    assert isinstance(Training(network, None, samples, SGD, ()).steps, ClosedForm)
    other = ShallowViT(np.random.default_rng(0), np.eye(5)[:, :4], 7, m=3, first=FirstWeights(0.1, 0.1, 0.1), **variant)
    assert isinstance(Training(other, None, samples, replace(SGD, **change), ()).steps, Autograd)


@pytest.mark.slow
def test_the_engine_runs_where_machine_code_cannot_be_kept(monkeypatch):
    njit, expected = numba.njit, fingerprint()

    def no_place(*args, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'step': no locator available for file 'kernels.py'")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", no_place)
    spec = importlib.util.spec_from_file_location("kernels_anew", kernels.__file__)
    assert spec is not None and spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    monkeypatch.setattr(closed_form, "kernels", anew)
    for name in ("Weights", "work_space"):
        monkeypatch.setattr(closed_form, name, getattr(anew, name))
    assert fingerprint() == expected
