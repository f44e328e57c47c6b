"""On a GPU: each strategy chooses as on the CPU, and waits for nothing; trainings, tests and runs come out the same."""

import json

import numpy as np
import pytest
import torch
from commands import call
from measured import TINY

import sparsebench
from sparsebench.inspection import speed
from sparsebench.models.actor import Actor
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.view import Images
from sparsebench.testing.networks import images_for, tiny
from sparsebench.training import evaluation
from sparsebench.training.fit import fit, modules_of
from sparsebench.training.steps import Samples

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings(
        "ignore:called a synchronizing CUDA operation",
        "ignore:Synchronization debug mode is a prototype",
        "ignore:Memory Efficient attention defaults to a non-deterministic",
        "ignore:.torch.jit.script_method. is deprecated",  # torch's compiler, on Python 3.12
        "ignore:TensorFloat32 tensor cores",  # torch's compiler
        "ignore:The CUDA Graph is empty",  # its first pass
    ),
]
GPU = "cuda:0"
REGISTRY = Registry()
STRATEGIES = sorted(found.cls.name for found in REGISTRY.strategies() if found.cls.budgeted)


def prepared(name, device, dtype=torch.float64, precision="float32", n=7):
    """Return a case on a device, and the strategy on it; one with a `fit` has learned there."""
    case = images_for("class token", tiny(), n, precision)
    strategy = REGISTRY.strategy(name).cls()
    case.network.module.to(dtype).to(device)
    inputs, relevance = case.inputs.to(dtype).to(device), case.relevance.to(device)
    actor = Actor(strategy, Budget(keep_rate=0.5), case.network.cost, case.network.grid, stream=5)
    rows = torch.arange(n, device=device)
    if strategy.fits():
        images = Images(inputs.flip(0), rows, rows % 2 if strategy.fit_labels else None)
        fit(case.network, actor, images, case.recipe, 5, relevance)
    modules_of(actor).to(dtype).to(device)
    return case.network, actor, inputs, relevance if strategy.kind == "oracle" else None, rows


def passed(network, actor, inputs, relevance, rows, training=False):
    """Return one pass and what came out of it."""
    shown = training or actor.strategy.trains_only
    acting = actor.begin(rows, 0, relevance, training=shown)
    with torch.set_grad_enabled(training):
        return acting, network(inputs, acting)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_chooses_as_on_the_cpu(name, training):
    """In double precision, in which nothing but ties could make a difference: tokens, their sizes, outputs."""
    here, on_gpu = (passed(*prepared(name, device), training=training) for device in ("cpu", GPU))
    assert len(here[0].decisions) == len(on_gpu[0].decisions)
    for mine, theirs in zip(here[0].decisions, on_gpu[0].decisions, strict=True):
        assert theirs.after.device.type == "cuda"
        np.testing.assert_array_equal(theirs.after.cpu(), mine.after)
    torch.testing.assert_close(on_gpu[0].sizes.cpu(), here[0].sizes)
    torch.testing.assert_close(on_gpu[1].cpu(), here[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_gradients_of_the_cpu(name):
    grads = []
    for device in ("cpu", GPU):
        ready = prepared(name, device)
        acting, outputs = passed(*ready, training=True)
        loss = outputs.square().sum()
        (loss + acting.loss() if acting.learns else loss).backward()
        weights = [*ready[0].module.named_parameters(), *modules_of(ready[1]).named_parameters()]
        grads.append({name: weight.grad.cpu() for name, weight in weights if weight.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_test_waits_for_the_gpu_once_and_not_once_a_batch(name):
    """An adaptive strategy reads counts; all others make the host wait as often for 2 batches as for 6."""
    network, actor, inputs, relevance, rows = prepared(name, GPU, torch.float32, n=48)
    waits = []
    for n in (16, 48, 48):  # the first time plans of a new shape are checked
        samples = Samples(inputs[:n], rows[:n] % 5, None if relevance is None else relevance[:n])
        evaluation.evaluate(network, actor, samples, images_for("class token", tiny()).recipe, 8)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns() as caught:
                evaluation.evaluate(network, actor, samples, images_for("class token", tiny()).recipe, 8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(one.message) for one in caught))
    assert waits[1] == waits[2]
    if not REGISTRY.strategy(name).cls.adaptive:
        assert waits[0] == waits[1], waits


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_acts_in_bfloat16(name):
    _, outputs = passed(*prepared(name, GPU, torch.float32, "bfloat16"))
    assert bool(outputs.isfinite().all())


def test_what_does_not_fit_the_gpu_is_tried_by_halves():
    network, _, inputs, _, rows = prepared("random", GPU, torch.float32, n=64)
    data, recipe = Samples(inputs, rows % 5, None), images_for("class token", tiny()).recipe
    whole = evaluation.evaluate(network, None, data, recipe, 64)
    each = torch.cuda.get_device_properties(0).total_memory // 20  # so that 16 images have no room, and 8 have some

    def hungry(module, args):
        torch.empty(each * len(args[0]), dtype=torch.uint8, device=GPU)

    network.module.patch_embed.register_forward_pre_hook(hungry)
    halved = evaluation.evaluate(network, None, data, recipe, 64)
    torch.cuda.empty_cache()
    assert whole.batch == 64 and halved.batch in (8, 16)
    np.testing.assert_array_equal(whole.predicted, halved.predicted)
    np.testing.assert_allclose(whole.losses, halved.losses, atol=1e-4)


WORDS = ("--suite", TINY, "--n-train", 32, "--seeds", 2, "--plugin", "attn_topk", "--plugin", "tome")


@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_a_run_comes_out_as_on_the_cpu(tmp_path, jobs):
    boards = {}
    for device in ("cpu", "auto"):
        out = tmp_path / device
        result = call("run", *WORDS, "--device", device, "--jobs", jobs, "--out", out)
        assert result.exit_code == 0, result.output
        boards[device] = store.read(out)
    assert boards["cpu"].keys() == boards["auto"].keys()
    for cell_id, mine in boards["cpu"].items():
        theirs = boards["auto"][cell_id]
        assert (mine.status, mine.metrics.keys()) == (theirs.status, theirs.metrics.keys())
        if "accuracy" in mine.metrics:
            assert abs(mine.metrics["accuracy"].value - theirs.metrics["accuracy"].value) <= 0.15
            assert mine.metrics["macs"].value == theirs.metrics["macs"].value
    said = json.dumps([path.read_text() for path in (tmp_path / "auto").rglob("*.json")])
    assert torch.cuda.get_device_name(0) in said


def test_sparse_networks_are_timed_on_the_gpu_eager_and_compiled():
    rows = list(
        speed.measure(
            {"tiny": tiny()}, ["attn_topk:keep_rate=0.5", "tome:keep_rate=0.5"], batches=(4,), rounds=3, device="cuda"
        )
    )
    assert [row.problem for row in rows] == [""] * 6
    assert all(row.memory and row.images_per_s and row.device == torch.cuda.get_device_name() for row in rows)


def test_a_sparse_network_is_moved_as_any_module_is():
    model = tiny()
    sparse = sparsebench.apply(model, "tome", keep_rate=0.5).eval()
    pixels = torch.rand(4, 3, 32, 32)
    with torch.inference_mode():
        here = sparse(pixels)
        there = sparse.to(GPU)(pixels.to(GPU)).cpu()
        again = sparse.to("cpu")(pixels)
    torch.testing.assert_close(there, here, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(again, here)
