"""VisionZip, VisPruner and PruMerge against the loops of their equations."""

import pytest
from merging import cosine, dot, mean, mean_keys, view
from sparsebench_plugins.pru_merge import PruMerge
from sparsebench_plugins.vis_pruner import VisPruner
from sparsebench_plugins.vision_zip import VisionZip
from test_bipartite import check, numbers

from sparsebench.strategy.plans import Keep


def vision_zip(order, keys, x, s, a, K):
    """Return rows and sizes if 3/10 of the remaining tokens are merged ones."""
    C = round(0.3 * K)
    dominant, others = order[: K - C], sorted(order[K - C :])
    targets = [others[m * (len(others) // C)] for m in range(C)]
    members = {j: [j] for j in [*dominant, *targets]}
    for i in others:
        if i not in targets:
            members[max(targets, key=lambda j, i=i: cosine(keys[i], keys[j]))].append(i)
    joined = [members[i] for i in sorted(members)]
    return [(mean([x[i] for i in g], [s[i] for i in g]), sum(s[i] for i in g)) for g in joined]


def vis_pruner(order, keys, x, s, a, K):
    """Return rows and sizes if half are the most attended tokens, and two others leave in each round."""
    important, others = order[: K // 2], sorted(order[K // 2 :])
    while len(others) > K - K // 2:
        even, odd = others[::2], others[1::2]
        repeats = {i: max(cosine(x[i], x[j]) for j in odd) for i in even}
        leave = sorted(even, key=lambda i: -repeats[i])[: min(2, len(others) - (K - K // 2))]
        others = [i for i in others if i not in leave]
    return [(x[i], s[i]) for i in sorted(important + others)]


def pru_merge(order, keys, x, s, a, K):
    """Return rows and sizes if each centre is merged with a quarter of the tokens."""
    rows = []
    for i in sorted(order[:K]):
        near = sorted((j for j in range(len(x)) if j != i), key=lambda j: -dot(keys[i], keys[j]))
        group = [i, *near[: round(len(x) / 4)]]
        rows.append((mean([x[j] for j in group], [a[j] for j in group]), 1.0))
    return rows


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [(VisionZip(contextual=0.3), vision_zip), (VisPruner(step=2), vis_pruner), (PruMerge(share=0.25), pru_merge)],
    ids=["vision_zip", "vis_pruner", "pru_merge"],
)
@pytest.mark.parametrize(("N", "keep"), [(16, 13), (17, 10), (17, 7), (16, 4)])
def test_what_goes_on_is_what_loops_make(N, keep, strategy, rule):
    seen = view(N=N, seed=N + keep)
    plan = strategy.plan(seen, keep)
    plan = Keep(plan.index.sort(dim=1).values) if isinstance(plan, Keep) else plan  # as the harness does

    def expected(b):
        a = seen.attention[b].double().tolist()
        order = sorted(range(N), key=lambda i: -a[i])
        return rule(order, mean_keys(seen, b), *numbers(seen, b), a, keep)

    check(seen, plan, expected)


@pytest.mark.parametrize(("keep", "contextual"), [(64, 10), (128, 20), (192, 30)])
def test_visionzip_merges_as_many_as_in_the_paper(keep, contextual):
    seen = view(1, 576)
    plan = VisionZip().plan(seen, keep)
    dominant = seen.attention[0].argsort(descending=True)[: keep - contextual]
    groups = plan.target[0].bincount()
    assert len(groups) == keep and (groups[plan.target[0, dominant]] == 1).all()
    assert groups.sum() == 576 and (plan.target >= 0).all()
