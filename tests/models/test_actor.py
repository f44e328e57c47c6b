from dataclasses import replace

import pytest
import torch
from sparsebench_plugins.random import Random
from token_sets import SetCost

from sparsebench.errors import StrategyError
from sparsebench.measure.cost import BlockCost, Step, VitCost
from sparsebench.models.actor import Actor
from sparsebench.strategy import tokens
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Rest, Shift

B, N, KEEP = 2, 6, 3
ONE = SetCost(tokens=N, d=4, m=8)
BLOCK = BlockCost(qkv=48, proj=16, mlp=128, width=4)
FOUR = VitCost(tokens=8, prefix=1, class_rows=1, embed=12, head=8, blocks=(BLOCK,) * 4)
TOKENS = torch.arange(B * N * 2.0).reshape(B, N, 2)
GIVEN = {"tokens": lambda: TOKENS}


def begin(
    strategy, cost=ONE, *, rate=0.5, items=(0, 1), visit=0, stream=7, relevance=None, blocks=None, training=False
):
    actor = Actor(strategy, Budget(keep_rate=rate, blocks=blocks), cost, None, stream)
    return actor.begin(torch.tensor(items), visit, relevance, training=training)


def full(*rows, dtype=torch.int64):
    return torch.tensor(rows, dtype=dtype)


NAN, HALF, ALIKE = torch.full((B, N), float("nan")), torch.full((B, N), 0.5), torch.ones(B, N)
NO_TOKEN = torch.arange(B)[:, None].expand(B, N) > 0
GOOD = full([0, 1, 2], [3, 4, 5])
ILLEGAL = {
    "nothing": (lambda: None, "returned None, which leaves all 6 tokens, but 3 must stay: return a plan"),
    "a string": (lambda: "keep", "returned str"),
    "a tensor": (lambda: GOOD, "returned Tensor"),
    "no index": (lambda: Keep(None), "Keep.index"),
    "an index that is a list": (lambda: Keep([[0, 1, 2], [3, 4, 5]]), "Keep.index must have shape .* got list"),
    "too few": (lambda: Keep(GOOD[:, :2]), r"Keep.index must have shape \(2, 3\), got \(2, 2\)"),
    "too many": (lambda: Keep(full([0, 1, 2, 3], [0, 1, 2, 3])), r"got \(2, 4\)"),
    "one sample": (lambda: Keep(GOOD[:1]), r"got \(1, 3\)"),
    "real numbers": (lambda: Keep(GOOD.float()), "int64, got torch.float32"),
    "booleans": (lambda: Keep(GOOD > 2), "int64, got torch.bool"),
    "below zero": (lambda: Keep(full([0, 1, 2], [-1, 4, 5])), r"must lie in 0..5, got -1..5"),
    "past the end": (lambda: Keep(full([0, 1, 6], [3, 4, 5])), r"must lie in 0..5, got 0..6"),
    "twice": (lambda: Keep(full([0, 1, 2], [3, 5, 3])), "names a token twice"),
    "NaN scores": (lambda: Keep(GOOD, scores=NAN), "scores holds NaN"),
    "scores of another shape": (lambda: Keep(GOOD, scores=torch.rand(B, KEEP)), r"scores must have shape \(2, 6\)"),
    "scores that are a list": (lambda: Keep(GOOD, scores=[1.0]), "scores must have shape .* got list"),
    "one too many beside the fused": (lambda: Keep(GOOD, fuse=torch.rand(B, N)), r"shape \(2, 2\), got \(2, 3\)"),
    "NaN to fuse": (lambda: Keep(GOOD[:, :2], fuse=NAN), "Keep.fuse holds NaN"),
    "few weights to fuse": (lambda: Keep(GOOD[:, :2], fuse=torch.rand(B, N - 1)), "Keep.fuse must have shape"),
    "no target": (lambda: Merge(None), "Merge.target"),
    "targets of another shape": (lambda: Merge(GOOD), r"Merge.target must have shape \(2, 6\), got \(2, 3\)"),
    "real targets": (lambda: Merge(torch.zeros(B, N)), "Merge.target must be int64"),
    "a group too many": (lambda: Merge(full(*[[0, 1, 2, 3, 0, 0]] * B)), r"must lie in 0..2, or be -1, got 0..3"),
    "a group below -1": (lambda: Merge(full(*[[0, 1, 2, -2, 0, 0]] * B)), r"must lie in 0..2, or be -1, got -2..2"),
    "an empty group": (lambda: Merge(full([0, 1, 2, 0, 1, 2], [0, 0, 2, 2, 2, 2])), "leaves one of its 3 groups empty"),
    "a group of weight 0": (
        lambda: Merge(full(*[[0, 1, 2, 0, 1, 2]] * B), weight=torch.tensor([[1.0, 2, 0, 1, 2, 0]] * B)),
        "Merge.weight is 0 for all tokens of a group",
    ),
    "infinite weights": (
        lambda: Merge(full(*[[0, 1, 2, 0, 1, 2]] * B), weight=torch.full((B, N), torch.inf)),
        "Merge.weight holds infinity",
    ),
    "no weight": (lambda: Mix(None), "Mix.weight"),
    "weights of another shape": (lambda: Mix(torch.rand(B, 4, N)), r"Mix.weight must have shape \(2, 3, 6\)"),
    "NaN weights": (lambda: Mix(torch.full((B, KEEP, N), float("nan"))), "Mix.weight holds NaN"),
    "values of a mask of booleans": (lambda: Mask(ALIKE > 0, values=TOKENS), "neither values nor sizes", "training"),
    "sizes of a mask of booleans": (lambda: Mask(ALIKE > 0, sizes=ALIKE), "neither values nor sizes", "training"),
    "few values": (lambda: Mask(HALF, values=TOKENS[:, :3]), r"Mask.values must have shape \(2, 6, 2\)", "training"),
    "few sizes": (lambda: Mask(HALF, sizes=ALIKE[:, :3]), r"Mask.sizes must have shape \(2, 6\)", "training"),
    "NaN values": (lambda: Mask(HALF, values=TOKENS * NAN[:, :, None]), "Mask.values holds NaN", "training"),
    "a size of 0": (lambda: Mask(HALF, sizes=ALIKE.triu()), "Mask.sizes must be positive", "training"),
    "a mask of whole numbers": (lambda: Mask(ALIKE.long()), "booleans, or real numbers", "training"),
    "above 1": (lambda: Mask(3 * HALF), "must lie in", "training"),
    "below 0": (lambda: Mask(-HALF), "must lie in", "training"),
    "NaN masks": (lambda: Mask(NAN), "holds NaN", "training"),
    "a mask of another shape": (lambda: Mask(ALIKE[:, 1:]), "must have shape", "training"),
    "a soft mask in a test": (lambda: Mask(ALIKE), "for training only", "test"),
    "a hard mask": (lambda: Mask(ALIKE > 0), "a boolean Mask keeps different counts", "test"),
    "an image without a token": (lambda: Mask(NO_TOKEN), "an image without a token", "adaptive"),
    "a shift in a test": (lambda: Shift(TOKENS), "for training only", "test"),
    "a shift of another shape": (lambda: Shift(TOKENS[:, 1:]), "must have shape", "training"),
    "few class tokens": (
        lambda: Shift(TOKENS, prefix=TOKENS[:, :0]),
        r"prefix must have shape \(2, 1, 2\)",
        "training",
    ),
    "few values to mix": (lambda: Mix(torch.zeros(B, KEEP, N), values=TOKENS[:, 1:]), "must have shape", "test"),
    "a token that rests twice": (lambda: Rest(full([0, 1, 1], [3, 4, 5])), "Rest.index names a token twice", "rest"),
    "rest past the end": (lambda: Rest(full([0, 1, 6], [3, 4, 5])), "Rest.index must lie in 0..5, got 0..6", "rest"),
    "rest below zero": (lambda: Rest(full([0, 1, 2], [-1, 4, 5])), "Rest.index must lie in 0..5, got -1..5", "rest"),
    "few that rest": (lambda: Rest(GOOD[:, :2]), r"Rest.index must have shape \(2, 3\), got \(2, 2\)", "rest"),
    "real places of rest": (lambda: Rest(GOOD.float()), "Rest.index must be int64, got torch.float32", "rest"),
    "no place of rest": (lambda: Rest(None), "Rest.index must have shape .* got NoneType", "rest"),
    "dropped where tokens rest": (lambda: Keep(GOOD), "returned Keep, and its how is 'rest': return Rest", "rest"),
    "rest of one that drops": (lambda: Rest(GOOD), "returned Rest, and its how is None: add how = 'rest'", "test"),
    "no token": (lambda: Keep(torch.empty(B, 0, dtype=torch.int64)), "must have shape", "adaptive"),
    "an empty group of all": (lambda: Merge(torch.ones(B, N, dtype=torch.int64)), "empty", "adaptive"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_an_illegal_plan_is_a_strategy_error_that_names_the_strategy(scripted, what):
    plan, message, *where = ILLEGAL[what]
    rests = where == ["rest"]
    strategy = scripted(lambda view, keep: plan(), site="block" if rests else "input")
    type(strategy).adaptive, type(strategy).how = where == ["adaptive"], "rest" if rests else None
    cost, blocks = replace(FOUR, tokens=N) if where else ONE, (0,) if rests else None
    acting = begin(strategy, cost, training=where == ["training"], blocks=blocks)
    with pytest.raises(StrategyError, match=rf"'scripted'.*{message}"):
        acting.decide(0, GIVEN)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: Keep(GOOD),
        lambda: Keep(GOOD, scores=torch.randint(0, 9, (B, N))),
        lambda: Keep(GOOD[:, :2], fuse=torch.rand(B, N)),
        lambda: Merge(full(*[[2, 1, 0, 0, 1, 2]] * B)),
        lambda: Merge(full(*[[2, 1, 0, 0, 1, 2]] * B), weight=torch.tensor([[3.0, -1, 0, 2, 0, 5]] * B)),
        lambda: Mix(torch.rand(B, KEEP, N)),
    ],
)
def test_a_legal_plan_leaves_as_many_tokens_as_asked_for(scripted, plan):
    acting = begin(scripted(lambda view, keep: plan()))
    assert isinstance(acting.decide(0, GIVEN), type(plan()))
    assert acting.index.shape == acting.sizes.shape == (B, KEEP)
    acting.record_block(N)
    assert acting.steps == [Step(N, KEEP)]


def test_a_mask_in_training_may_say_what_tokens_and_sizes_become(scripted):
    acting = begin(scripted(lambda view, keep: Mask(HALF, values=-TOKENS, sizes=2 * ALIKE)), training=True)
    plan = acting.decide(0, GIVEN)
    assert torch.equal(tokens.apply(plan, TOKENS, ALIKE), -TOKENS)
    assert acting.sizes.tolist() == [[2.0] * N] * B and acting.weights().tolist() == HALF.tolist()
    assert acting.index.tolist() == [list(range(N))] * B
    assert torch.equal(tokens.apply(Mask(HALF), TOKENS, ALIKE), TOKENS)


def test_one_token_may_be_all_fused_ones(scripted):
    empty = Keep(torch.empty(B, 0, dtype=torch.int64), fuse=torch.ones(B, N))
    acting = begin(scripted(lambda view, keep: empty), rate=1 / N)
    assert acting.decide(0, GIVEN).index.shape == (B, 0)
    assert acting.index.tolist() == [[-1]] * B and acting.sizes.tolist() == [[6.0]] * B


@pytest.mark.parametrize("kind", ["deployable", "baseline"])
def test_relevance_is_refused_to_all_but_oracles(scripted, kind):
    with pytest.raises(StrategyError, match="'scripted' needs the relevance mask"):
        begin(scripted(lambda view, keep: None, needs=("relevance",), kind=kind), relevance=torch.ones(B, N))


def test_kept_tokens_go_on_in_their_old_order(scripted):
    acting = begin(scripted(lambda view, keep: Keep(full([5, 0, 3], [4, 2, 1]))))
    assert acting.decide(0, GIVEN).index.tolist() == [[0, 3, 5], [1, 2, 4]] == acting.index.tolist()


@pytest.mark.parametrize(
    ("second", "names"),
    [
        (Keep(full([4, 1, 0], [0, 4, 2])), [[5, 0, 2], [4, 1, 3]]),
        (Keep(full([4, 1], [0, 4]), fuse=torch.ones(B, 5), ordered=True), [[2, 0, -1], [4, 3, -1]]),
    ],
    ids=["in the order in which they came", "ordered"],
)
def test_ordered_tokens_go_on_as_the_index_has_them(scripted, second, names):
    first = Keep(full([5, 0, 3, 7, 2], [4, 2, 1, 0, 3]), ordered=True)
    strategy = scripted(lambda view, keep: first if view.block == 1 else second, site="block")
    acting = begin(strategy, FOUR, rate=0.7, blocks=(1, 3))
    assert acting.decide(1, GIVEN).index.tolist() == first.index.tolist() == acting.index.tolist()
    acting.decide(3, GIVEN)
    assert acting.index.tolist() == names


def test_where_as_many_stay_as_there_are_nobody_is_asked(scripted):
    acting = begin(scripted(lambda view, keep: pytest.fail("asked")), rate=1.0)
    assert not acting.acts(0) and acting.decide(0, GIVEN) is None
    assert begin(scripted(lambda view, keep: None)).acts(0)


def test_the_scores_of_the_first_decision_are_kept(scripted):
    drawn = []

    def decide(view, keep):
        drawn.append(torch.rand(view.index.shape))
        return Keep.top(drawn[-1], keep)

    acting = begin(scripted(decide, site="block", needs=()), FOUR, blocks=(1, 2))
    for block in (1, 2):
        acting.decide(block, {})
    assert acting.scores is drawn[0] and len(drawn) == 2


def test_the_view_has_the_remaining_patches_and_their_sizes(scripted):
    """The view tells which patches are left and how many each stands for."""
    seen = []

    def decide(view, keep):
        place = view.block, view.depth, view.training, view.prefix_count
        seen.append((place, view.index.tolist(), view.sizes.tolist(), view.relevance.tolist()))
        if view.block == 1:
            return Keep(full([6, 1, 3], [7, 0, 2]), fuse=torch.ones(B, 8))
        return Merge(full([0, 0, 1, 1], [1, 0, 0, 1]))

    mask = (torch.arange(8.0).expand(B, 8) + 1) / 10
    strategy = scripted(decide, site="block", needs=("relevance",), kind="oracle")
    acting = begin(strategy, FOUR, blocks=(1, 3), relevance=mask, training=True)
    acting.decide(1, {})
    acting.decide(3, {})
    (_, second) = seen
    assert second[:3] == ((3, 4, True, 1), [[1, 3, 6, -1], [0, 2, 7, -1]], [[1, 1, 1, 5]] * 2)
    assert second[3] == [[pytest.approx(x) for x in row] for row in ([0.2, 0.4, 0.7, 0], [0.1, 0.3, 0.8, 0])]
    assert acting.sizes.tolist() == [[2, 6], [2, 6]]


def kept(items, **changes):
    acting = begin(Random(), items=items, **changes)
    acting.decide(0, GIVEN)
    return [tuple(row) for row in acting.index.tolist()]


def test_random_numbers_do_not_depend_on_the_batch():
    """A sample is drawn for alike alone and in any batch and differently by sample visit and stream."""
    items = list(range(40))
    plain = kept(items)
    assert kept(items[::-1]) == plain[::-1] and [kept([item])[0] for item in items] == plain
    assert len(set(plain)) > 10
    for changes in ({"visit": 1}, {"stream": 8}):
        assert sum(a == b for a, b in zip(kept(items, **changes), plain, strict=True)) < 12


def test_random_numbers_differ_by_block_and_draw(scripted):
    """Draws differ by block and number and may be of many numbers a token."""
    drawn = []

    def decide(view, keep):
        drawn.append([view.random(*draw) for draw in ((), (0,), (1,), (0, 1), (0, 5), (1, 5))])

    for items in ([4, 9, 2], [2, 9]):
        acting = begin(scripted(decide, site="block", needs=(), budgeted=False), FOUR, blocks=(1, 2), items=items)
        acting.decide(1, {})
        acting.decide(2, {})
    (plain, again, other, one, many, others), (later, *_), alone, _ = drawn
    assert torch.equal(plain, again) and torch.equal(plain, one[:, :, 0]) and many.shape == (3, 8, 5)
    assert all(x.min() >= 0 and x.max() < 1 and x.unique().numel() == x.numel() for x in drawn[0])
    assert not any(torch.equal(*pair) for pair in ((plain, other), (plain, later), (many, others)))
    assert all(torch.equal(x[[2, 1]], y) for x, y in zip(drawn[0], alone, strict=True))


@pytest.mark.parametrize("own", [-1.0, float("nan"), float("inf")])
def test_a_choice_cannot_cost_less_than_nothing(scripted, monkeypatch, own):
    strategy = scripted(lambda view, keep: Keep(GOOD))
    acting = begin(strategy)
    monkeypatch.setattr(type(strategy), "own_macs", lambda self, place: own)
    acting.actor.traits = strategy.traits()
    with pytest.raises(StrategyError, match="own_macs must be numbers of 0 or more"):
        acting.decide(0, GIVEN)
