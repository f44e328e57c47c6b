"""ATS against loops over its equations in float64."""

import math

import numpy as np
import pytest
import torch
from merging import view
from sparsebench_plugins.ats import ATS
from tiny import B, N, act, images, vit

from sparsebench.tokens import Padded


def shares(attention, values):
    """Return S_j = a_j ||v_j|| / sum of one sample's, values (H, N, d)."""
    given = [a * math.sqrt(sum(float(v) ** 2 for v in values[:, j].flatten())) for j, a in enumerate(attention)]
    return [g / sum(given) for g in given]


def taken(S, M, ascending):
    """Return which tokens the M points fall upon; of two as near the one with the smaller sum."""
    order = sorted(range(len(S)), key=lambda j: (S[j], j)) if ascending else list(range(len(S)))
    c, total = [], 0.0
    for j in order:
        total += S[j]
        c.append(total)
    out = set()
    for m in range(1, M + 1):
        y = (2 * m - 1) / (2 * M)
        out.add(order[min(range(len(c)), key=lambda i: (abs(c[i] - y), i))])
    return out


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("M", [1, 2, 5, 11, 16])
def test_the_points_take_the_tokens_whose_sum_is_nearest(M, ascending):
    values = torch.randn(3, 2, 17, 5, generator=torch.Generator().manual_seed(M))
    attention = torch.rand(3, 17, generator=torch.Generator().manual_seed(M + 1)) ** 4
    plan = ATS(ascending=ascending).plan(view(attention=attention, values=values), M)
    for b in range(3):
        S = shares(attention[b].double().tolist(), values[b].double())
        assert plan.scores[b].tolist() == pytest.approx(S, abs=1e-6)
        assert set(plan.keep[b].nonzero()[:, 0].tolist()) == taken(S, M, ascending)
        assert 1 <= int(plan.keep[b].sum()) <= M


def test_the_more_uneven_the_attention_the_fewer_stay():
    attention = torch.rand(1, 17, generator=torch.Generator().manual_seed(0)).expand(3, 17)
    uneven = torch.stack([row**p for row, p in zip(attention, (0.0, 2.0, 12.0), strict=True)])
    plan = ATS().plan(view(attention=uneven, values=torch.ones(3, 2, 17, 4)), 12)
    counts = plan.keep.sum(dim=1).tolist()
    assert counts[0] == 12 and counts == sorted(counts, reverse=True) and counts[2] < 8


def test_padding_is_never_taken():
    sizes = (torch.arange(17) < torch.tensor([17, 9, 1])[:, None]).float()
    attention = torch.rand(3, 17, generator=torch.Generator().manual_seed(0))
    values = torch.randn(3, 2, 17, 5, generator=torch.Generator().manual_seed(1))
    plan = ATS().plan(view(attention=attention, values=values, sizes=sizes), 8)
    for b, there in enumerate((17, 9, 1)):
        S = shares(attention[b, :there].double().tolist(), values[b, :, :there].double())
        assert set(plan.keep[b].nonzero()[:, 0].tolist()) == taken(S, 8, True)


@pytest.mark.parametrize("changes", [{}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_in_a_network_images_keep_different_numbers_and_only_what_stays_is_a_query(changes):
    network = vit(**changes)
    pixels = torch.cat([images(3), torch.full((1, 3, 32, 32), 0.5)])
    acting, out = act(ATS(), network, pixels, rate=0.9, schedule="stages")
    assert acting.ragged and all(isinstance(d.plan, Padded) for d in acting.decisions)
    assert len(set(acting.sizes.sum(dim=1).tolist())) > 1 and bool(out.isfinite().all())
    assert all(step.early for step in acting.steps if np.any(step.tokens_in != step.tokens_out))
    for b in range(B):
        alone, single = act(ATS(), network, pixels[b : b + 1], rate=0.9, items=torch.tensor([b]), schedule="stages")
        there = acting.index[b][acting.index[b] >= 0]
        assert torch.equal(alone.index[0], there) and len(there) <= N
        torch.testing.assert_close(single[0], out[b], atol=1e-5, rtol=1e-4)
