"""VisionZip, VisPruner and PruMerge against loops in float64: the logits of whole networks, and single choices."""

import networks as hand
import pytest
from merging import cosine, view
from sparsebench_plugins.pru_merge import PruMerge
from sparsebench_plugins.vis_pruner import VisPruner
from sparsebench_plugins.vision_zip import VisionZip
from tiny import B, vit

COUNTS = {0: 13, 1: 10, 2: 7, 3: 4}


def attention_of(seen):
    return seen.of_class() if seen.prefix else seen.received()


def vision_zip(seen, tokens, K):
    """Return the tokens when 3/10 of those that go on are merged ones."""
    C, keys = round(0.3 * K), seen.keys[seen.prefix :]
    order = hand.order_of(attention_of(seen))
    dominant, others = order[: K - C], sorted(order[K - C :])
    step = len(others) // C
    targets = [others[m * step] for m in range(C)]
    members = {j: [j] for j in targets}
    for i in others:
        if i not in targets:
            members[max(targets, key=lambda j, i=i: cosine(keys[i], keys[j]))].append(i)
    return [tokens[i] if i in dominant else hand.joined([tokens[j] for j in members[i]])
            for i in sorted([*dominant, *targets])]  # fmt: skip


def vis_pruner(seen, tokens, K):
    """Return the tokens when half are the most attended ones, and two others leave at a time."""
    order = hand.order_of(attention_of(seen))
    important, others = order[: K // 2], sorted(order[K // 2 :])
    while len(others) > K - K // 2:
        even, odd = others[::2], others[1::2]
        repeats = {i: max(cosine(tokens[i].row, tokens[j].row) for j in odd) for i in even}
        leave = sorted(even, key=lambda i: -repeats[i])[: min(2, len(others) - (K - K // 2))]
        others = [i for i in others if i not in leave]
    return [tokens[i] for i in sorted(important + others)]


def pru_merge(seen, tokens, K):
    """Return the tokens when a centre takes in a quarter of those that come."""
    a, keys, N = attention_of(seen), seen.keys[seen.prefix :], len(tokens)
    out = []
    for i in sorted(hand.order_of(a)[:K]):
        near = sorted(
            (j for j in range(N) if j != i), key=lambda j: -sum(x * y for x, y in zip(keys[i], keys[j], strict=True))
        )
        group = [i, *near[: round(N / 4)]]
        row = hand.joined([tokens[j] for j in group], weights=[a[j] for j in group]).row
        out.append(hand.Token(row))
    return out


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [(VisionZip(contextual=0.3), vision_zip), (VisPruner(step=2), vis_pruner), (PruMerge(share=0.25), pru_merge)],
    ids=["vision_zip", "vis_pruner", "pru_merge"],
)
@pytest.mark.parametrize("name", hand.NETWORKS)
def test_the_logits_and_the_sizes_are_those_of_loops(name, strategy, rule):
    prefix, changes = hand.NETWORKS[name]
    budget = {"blocks": tuple(COUNTS), "counts": tuple(COUNTS.values())}
    acting = hand.compare(strategy, vit(**changes), hand.at(COUNTS, rule), budget, sized=True, prefix=prefix)
    assert acting.sizes.shape == (B, COUNTS[3])


@pytest.mark.parametrize(("keep", "contextual"), [(64, 10), (128, 20), (192, 30)])
def test_visionzip_merges_as_many_as_in_the_paper(keep, contextual):
    seen = view(1, 576)
    plan = VisionZip().plan(seen, keep)
    dominant = seen.attention[0].argsort(descending=True)[: keep - contextual]
    groups = plan.target[0].bincount()
    assert len(groups) == keep and (groups[plan.target[0, dominant]] == 1).all()
    assert groups.sum() == 576 and (plan.target >= 0).all()
