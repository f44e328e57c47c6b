"""PPT against loops in float64: which images prune and which merge, and the logits; and what its variance decides."""

import networks as hand
import pytest
import torch
from merging import view
from sparsebench_plugins.ppt import PPT
from tiny import B, N, vit

COUNTS = {0: 13, 1: 9, 2: 6, 3: 4}


def importance(attention, values):
    """Return the scores, each token's share of attention times the length of its value, and their variance."""
    given = [a * sum(x * x for x in value) ** 0.5 for a, value in zip(attention, values, strict=True)]
    scores = [one / sum(given) for one in given]
    mean = sum(scores) / len(scores)
    return scores, sum((one - mean) ** 2 for one in scores) / len(scores)


def rule_of(threshold, chosen):
    """Return the rule of a threshold, which notes what it does."""

    def rule(seen, tokens, K):
        attention = seen.of_class() if seen.prefix else seen.received()
        scores, variance = importance(attention, seen.values[seen.prefix :])
        drops = variance * N**2 > threshold
        chosen.append("drop" if drops else "merge")
        if not drops:
            return hand.tome(seen, tokens, K)
        return [tokens[i] for i in sorted(hand.order_of(scores)[:K])]

    return rule


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0, 100.0])
@pytest.mark.parametrize("name", hand.NETWORKS)
def test_the_logits_and_the_sizes_are_those_of_loops(name, threshold):
    prefix, changes = hand.NETWORKS[name]
    budget, every = {"blocks": tuple(COUNTS), "counts": tuple(COUNTS.values())}, []
    rule = hand.at(COUNTS, rule_of(threshold, every))
    acting = hand.compare(PPT(threshold=threshold), vit(**changes), rule, budget, prefix=prefix, proportional=True)
    assert set(every) == ({"drop"} if threshold == 0 else {"merge"} if threshold == 100 else {"drop", "merge"}), every
    assert acting.index.shape == (B, COUNTS[3])


def known(spread):
    """Return a view of two images: the attention of the second is even, of the first one token has `spread` more."""
    attention = torch.ones(2, 16)
    attention[0, 5] += spread
    return view(2, 16, values=torch.ones(2, 2, 16, 3), attention=attention)


def test_the_variance_is_measured_by_the_patches_at_the_input():
    seen, later = known(6.0), known(6.0)
    later.memory["patches"] = 8
    first, second = (PPT(threshold=1.0).plan(one, 9).target[0] for one in (seen, later))
    assert bool((first == -1).any()) and not bool((second == -1).any())
    assert seen.memory["patches"] == 16
