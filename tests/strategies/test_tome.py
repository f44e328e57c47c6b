"""ToMe against the loops of its equations, and the published counts and MACs of DeiT-S."""

from dataclasses import replace

import pytest
import timm
import torch
from merging import cosine, mean, mean_keys, merged, view
from sparsebench_plugins.tome import ToMe

from sparsebench.measure.counts import solve, stages
from sparsebench.models.timm_parts import vit_cost
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.tokens import sizes_after


def by_loops(seen, b, keep):
    """Return the new tokens and their sizes: (x, s) of the unmerged ones of A, then of B.

    A has the even places of the whole sequence, in which the P prefix tokens come first.
    """
    keys, x, s = mean_keys(seen, b), seen.tokens[b].double().tolist(), seen.sizes[b].tolist()
    P = seen.prefix_count
    A, B = ([i for i in range(len(x)) if (P + i) % 2 == odd] for odd in (0, 1))
    best = {i: max(B, key=lambda j: cosine(keys[i], keys[j])) for i in A}
    ranked = sorted(A, key=lambda i: -cosine(keys[i], keys[best[i]]))
    gone, left = ranked[: len(x) - keep], ranked[len(x) - keep :]
    out = [(x[i], s[i]) for i in (sorted(left) if P else left)]
    for j in B:
        group = [j] + [i for i in gone if best[i] == j]
        out.append((mean([x[i] for i in group], [s[i] for i in group]), sum(s[i] for i in group)))
    return out


@pytest.mark.parametrize("P", [0, 1, 2, 5])
@pytest.mark.parametrize(("N", "keep"), [(17, 16), (17, 12), (17, 9), (16, 8), (16, 15), (3, 2), (2, 1)])
def test_tome_merges_what_the_loops_do_in_their_order(N, keep, P):
    seen = view(N=N, seed=N + keep, prefix_count=P)
    plan = ToMe().plan(seen, keep)
    x, s = merged(plan, seen), sizes_after(plan, seen.sizes)
    for b in range(3):
        expected = by_loops(seen, b, keep)
        torch.testing.assert_close(x[b], torch.tensor([x for x, _ in expected]), atol=1e-5, rtol=1e-5)
        assert s[b].tolist() == [s for _, s in expected]


def test_equal_keys_merge_the_first_pairs():
    for P, target in ((1, [2, 2, 3, 2, 4, 0, 5, 1]), (2, [2, 2, 2, 3, 0, 4, 1, 5]), (0, [2, 2, 2, 3, 0, 4, 1, 5])):
        seen = view(1, 8, keys=torch.ones(1, 2, 8, 6), sizes=torch.ones(1, 8), prefix_count=P)
        assert ToMe().plan(seen, 6).target.tolist() == [target]


def test_without_prefix_tokens_the_most_similar_of_those_left_goes_first():
    angles = torch.tensor([0.0, 0.01, 3.0, 2.0, 5.0, 4.6, 1.5, 1.4])  # A at 0, 2, 4, 6: 0.01, 1.0, 0.4, 0.1 away
    keys = torch.stack([angles.cos(), angles.sin()], dim=1).expand(1, 1, 8, 2)
    for P, target in ((0, [3, 3, 2, 4, 1, 5, 0, 6]), (2, [3, 3, 0, 4, 1, 5, 2, 6])):
        seen = view(1, 8, keys=keys, sizes=torch.ones(1, 8), prefix_count=P)
        assert ToMe().plan(seen, 7).target.tolist() == [target]


@pytest.fixture(scope="module")
def deit_small():
    with torch.device("meta"):
        return vit_cost(timm.create_model("deit_small_patch16_224"), class_rows=1)


@pytest.mark.parametrize(
    ("budget", "left", "gmacs", "pairs"),
    [
        (Budget(per_block=8), 100, 3.416, sum(n * n for n in range(98, 53, -4))),
        (Budget(per_block=13), 40, 2.703, sum((n // 2) * (n - n // 2) for n in range(196, 52, -13))),
        (Budget(per_block=16), 10, 2.291, sum(n * n for n in range(98, 9, -8))),
        (Budget(keep_rate=0.9, schedule="stages"), (176, 158, 142), 3.960, 98**2 + 88**2 + 79**2),
        (Budget(keep_rate=0.7, schedule="stages"), (137, 96, 67), 2.980, 98**2 + 68 * 69 + 48**2),
        (Budget(keep_rate=0.5, schedule="stages"), (98, 49, 25), 2.282, 98**2 + 49**2 + 24 * 25),
        (Budget(keep_rate=0.25, schedule="stages"), (98, 61, 52), 2.480, 98**2 + 49**2 + 30 * 31),
    ],
    ids=lambda value: value.label if isinstance(value, Budget) else None,
)
def test_the_counts_and_macs_of_deit_small_are_the_published_ones_but_for_the_similarities(
    deit_small, budget, left, gmacs, pairs
):
    traits = ToMe().traits()
    blocks, counts = stages(budget, traits, 12), solve(budget, deit_small, traits)
    assert left in (counts, counts[-1])
    steps = deit_small.steps(traits, blocks, counts)
    published = deit_small.macs([replace(step, own=0) for step in steps])
    assert published / 1e9 == pytest.approx(gmacs, abs=6e-4)
    assert deit_small.macs(steps) == published + 64 * pairs
