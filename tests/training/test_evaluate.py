import numpy as np
import pytest
import torch
from sparsebench_plugins.random import Random
from token_sets import OneLayer, Sets

from sparsebench.errors import StrategyError, UnsupportedError
from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Merge
from sparsebench.tasks.images import Composite
from sparsebench.training.evaluation import BATCH, evaluate, ranks
from sparsebench.training.steps import Samples

N = BATCH + 30  # two batches, the second is short
TASK = Sets(tokens=10, relevant=0.4, confusion=0.1, test=N)
DATA = TASK.draw(4, 0, {})
NETWORK = OneLayer(m=16).build(DATA, 0)


def of_sets():
    return Samples(*(torch.from_numpy(x) for x in (DATA.test.inputs, DATA.test.labels, DATA.test.relevance)))


def actor_of(strategy, network=NETWORK, **budget):
    return Actor(strategy, Budget(**(budget or {"keep_rate": 0.5})), network.cost, network.grid, 3)


def test_without_a_strategy_all_tokens_are_kept_and_nothing_is_recorded():
    told: list[int] = []
    result = evaluate(NETWORK, None, of_sets(), TASK.recipe(), on_done=told.append)
    assert told == [BATCH, N]
    assert result.kept.all() and result.kept.shape == (N, 10)
    assert result.steps == result.choices == []
    with torch.no_grad():
        margins = NETWORK(of_sets().inputs)
    assert result.predicted.tolist() == (margins > 0).long().tolist()
    hinge = torch.relu(1 - (2 * of_sets().labels - 1) * margins).double().mean()
    assert result.loss == pytest.approx(float(hinge), rel=1e-5)


def test_a_sample_is_judged_alike_whatever_comes_with_it():
    samples, actor = of_sets(), actor_of(Random())
    whole = evaluate(NETWORK, actor, samples, TASK.recipe())
    assert whole.steps == [Step(10, 5, early=True)]
    for i in (0, 7, BATCH - 1, BATCH, N - 1):
        with torch.no_grad():
            margin, acting = samples.forward(NETWORK, actor, torch.tensor([i]), visit=0, training=False)
        assert whole.kept[i].nonzero()[0].tolist() == acting.index[0].tolist()
        assert whole.predicted[i] == int(margin[0] > 0)
    assert len({tuple(row) for row in whole.kept.tolist()}) > 50


@pytest.fixture(scope="module")
def images():
    task = Composite(canvas=16, foreground=10, test=8)
    data = task.draw(4, 0, {})
    network = Vit(dim=16, depth=4, heads=2, patch=4).build(data, 0)
    split = data.test
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance_on(network.grid)))
    return network, Samples(*tensors), task.recipe()


STAGES = {"keep_rate": 0.5, "blocks": (1, 2, 3)}


def test_choices_have_the_scores_of_each_block(scripted, images):
    """Each choice is told block by block with the scores of what was there."""
    network, samples, recipe = images
    seen = []

    def decide(view, keep):
        seen.append((view.index, view.random()))
        return Keep.top(seen[-1][1], keep)

    strategy = scripted(decide, site="block", needs=())
    result = evaluate(network, actor_of(strategy, network, **STAGES), samples, recipe, choices=True)
    assert [choice.block for choice in result.choices] == [-1, 1, 2, 3]
    for choice, (index, scores), after in zip(result.choices[1:], seen, [*(i for i, _ in seen[1:]), None], strict=True):
        there = {(b, int(k)): float(x) for b in range(8) for k, x in zip(index[b], scores[b], strict=True)}
        for place, score in np.ndenumerate(choice.scores):
            assert score == there[place] if place in there else np.isnan(score)
        if after is not None:
            assert [set(np.flatnonzero(row)) for row in choice.kept] == [set(row.tolist()) for row in after]
    assert (result.choices[-1].kept == result.kept).all()


def test_a_block_without_a_choice_is_no_choice(scripted, images):
    """A block that a strategy lets pass is no choice and samples it leaves alone keep all."""
    network, samples, recipe = images

    def decide(view, keep):
        return None if view.block != 2 else Keep.top(view.random(), keep)

    actor = actor_of(scripted(decide, site="block", needs=(), budgeted=False), network, **STAGES)
    result = evaluate(network, actor, samples, recipe, choices=True)
    assert [choice.block for choice in result.choices] == [-1, 2]
    assert not np.isnan(result.choices[1].scores).any() and result.choices[1].kept.sum() == 8 * 4
    tensors = (samples.inputs, samples.labels, samples.relevance)
    two, calls = Samples(*(torch.cat([x] * (2 * BATCH // 8)) for x in tensors)), []
    last = scripted(
        lambda view, keep: calls.append(1) or (None if len(calls) == 1 else decide_last(view, keep)), budgeted=False
    )
    _, choice = evaluate(network, actor_of(last, network), two, recipe, choices=True).choices
    assert choice.kept[:BATCH].all() and (choice.scores[:BATCH] == 1).all()
    assert (choice.kept[BATCH:].sum(axis=1) == 8).all()


def decide_last(view, keep):
    return Keep(torch.arange(16 - keep, 16).expand(len(view.index), keep))


def test_a_fused_token_has_no_score_of_a_patch(scripted, images):
    network, samples, recipe = images

    def decide(view, keep):
        fuse = torch.ones(view.index.shape)
        return Keep(torch.arange(keep - 1).expand(len(fuse), -1), fuse=fuse, scores=fuse.cumsum(dim=1))

    fuse = scripted(decide, site="block", needs=())
    result = evaluate(network, actor_of(fuse, network, **STAGES), samples, recipe, choices=True)
    _, first, second, _ = result.choices
    assert first.kept.tolist() == [[True] * 7 + [False] * 9] * 8
    assert second.scores[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7] and np.isnan(second.scores[0, 7:]).all()
    assert second.kept.tolist() == [[True] * 3 + [False] * 13] * 8


def test_a_group_counts_as_its_first_patch(scripted, images):
    network, samples, recipe = images
    pairs = scripted(lambda v, keep: Merge(torch.arange(16).expand(v.index.shape) // 2))
    result = evaluate(network, actor_of(pairs, network), samples, recipe)
    assert result.kept.tolist() == [[True, False] * 8] * 8


def test_the_network_is_tested_as_it_is_and_left_without_gradients(scripted, images):
    network, samples, recipe = images
    network.module.train()
    told = set()
    strategy = scripted(lambda view, keep: told.add((view.training, network.module.training)), budgeted=False)
    first = evaluate(network, actor_of(strategy, network), samples, recipe)
    again = evaluate(network, None, samples, recipe)
    assert told == {(False, False)}
    assert first.loss == pytest.approx(again.loss, rel=1e-6)
    assert all(p.grad is None for p in network.module.parameters())


def test_full_batches_are_timed_but_the_first(scripted, monkeypatch):
    """A full batch is timed with what its strategy took but the first and the short one."""
    clock = {"now": 0.0}

    def passing(seconds, value=None):
        clock["now"] += seconds
        return value

    take = Samples.take
    monkeypatch.setattr("sparsebench.training.evaluation.time.perf_counter", lambda: clock["now"])
    monkeypatch.setattr(Samples, "take", lambda self, rows: passing(100, take(self, rows)))
    strategy = scripted(
        lambda view, keep: passing(len(view.index), Keep(torch.arange(keep).expand(len(view.index), keep)))
    )
    samples = of_sets()
    samples.items = samples.items[:70]
    monkeypatch.setattr("sparsebench.training.evaluation.first_batch", lambda network, samples: 20)
    assert evaluate(NETWORK, actor_of(strategy), samples, TASK.recipe()).seconds == [20, 20]


def test_the_rank_of_a_label_is_its_place_in_a_stable_sort():
    rng = torch.Generator().manual_seed(0)
    outputs, labels = torch.randint(0, 6, (50, 12), generator=rng).float(), torch.randint(0, 12, (50,), generator=rng)
    order = outputs.argsort(dim=1, descending=True, stable=True)
    result = ranks(Composite().recipe(), outputs, labels)
    assert result.tolist() == (order == labels[:, None]).int().argmax(dim=1).tolist()
    assert ((result == 0) == (outputs.argmax(dim=1) == labels)).all()


def test_the_batch_is_halved_while_there_is_no_memory(scripted):
    came = []

    def hungry(view, keep):
        came.append(len(view.index))
        if came[-1] > 30:
            raise torch.OutOfMemoryError("too many")
        return Keep.top(view.tokens[..., 0], keep)

    modest = scripted(lambda view, keep: Keep.top(view.tokens[..., 0], keep))
    result = evaluate(NETWORK, actor_of(scripted(hungry)), of_sets(), TASK.recipe())
    whole = evaluate(NETWORK, actor_of(modest), of_sets(), TASK.recipe())
    assert result.batch == 25 and whole.batch == BATCH and came[:4] == [200, 100, 50, 25]
    assert (result.predicted == whole.predicted).all() and (result.kept == whole.kept).all()
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(NETWORK, actor_of(scripted(starving)), of_sets(), TASK.recipe())


def test_an_illegal_plan_is_named_in_any_batch(scripted):
    """An illegal plan is an error that says what is wrong in whatever batch it is."""

    def decide(view, keep):
        index = torch.arange(keep).repeat(len(view.index), 1)
        index[torch.isin(view.tokens[:, 0, 0], bad), 1] = 0  # a token twice
        return Keep(index)

    samples, strategy = of_sets(), scripted(decide)
    for number in (3, 70, N - 1):
        bad = samples.inputs[number, 0, 0]
        with pytest.raises(StrategyError, match="names a token twice"):
            evaluate(NETWORK, actor_of(strategy), samples, TASK.recipe(), 30)


def starving(view, keep):
    raise torch.OutOfMemoryError("one is too many")


def test_samples_without_relevance_are_evaluated_alike(scripted):
    """Samples without a mask of relevance are evaluated like those with one."""
    known, unknown = of_sets(), of_sets()
    unknown.relevance = None
    result, again = (evaluate(NETWORK, actor_of(Random()), samples, TASK.recipe()) for samples in (known, unknown))
    assert (result.predicted == again.predicted).all() and (result.kept == again.kept).all()
    oracle = scripted(lambda view, keep: Keep.top(view.relevance, keep), needs=("relevance",), kind="oracle")
    with pytest.raises(UnsupportedError, match="the data of this cell has no relevance mask"):
        evaluate(NETWORK, actor_of(oracle), unknown, TASK.recipe())


def test_classes_that_are_absent_are_no_answers(images):
    network, samples, recipe = images
    samples.absent = torch.arange(network.module.num_classes) != 3
    result = evaluate(network, None, samples, recipe)
    samples.absent = None
    assert (result.predicted == 3).all() and (result.confidence == 1).all()
