"""ToMe, ToFu, PPT, PiToMe, MCTF, DiffRate and the disposals of scores against the loops of their equations."""

import math

import pytest
import torch
from merging import cosine, mean, mean_keys, merged, view
from sparsebench_plugins.diffrate import DiffRate
from sparsebench_plugins.feature_norm import FeatureNorm
from sparsebench_plugins.mctf import MCTF
from sparsebench_plugins.pitome import PiToMe
from sparsebench_plugins.ppt import PPT
from sparsebench_plugins.tofu import ToFu
from sparsebench_plugins.tome import ToMe

from sparsebench.strategy.plans import DISPOSALS, Keep
from sparsebench.strategy.tokens import sizes_after

HALVES = [(17, 16), (17, 12), (17, 9), (16, 8), (16, 15), (3, 2), (2, 1)]


def numbers(seen, b):
    """Return the tokens and sizes of sample b in float64."""
    return seen.tokens[b].double().tolist(), seen.sizes[b].double().tolist()


def check(seen, plan, expected, size_tolerance=0.0):
    """Compare the tokens and sizes after the plan with `expected(b)`, pairs of token and size."""
    x, s = merged(plan, seen), sizes_after(plan, seen.sizes)
    for b in range(len(x)):
        rows = expected(b)
        torch.testing.assert_close(x[b], torch.tensor([x for x, _ in rows]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(s[b], torch.tensor([float(s) for _, s in rows]), atol=size_tolerance, rtol=0)


def groups(host):
    """Return the members of each token that is its own host, in order of position; the host is the first member."""
    hosts = [j for j, h in enumerate(host) if h == j]
    return [[j] + [i for i, h in enumerate(host) if h == j and i != j] for j in hosts]


def means(seen, b, host):
    x, s = numbers(seen, b)
    return [(mean([x[i] for i in g], [s[i] for i in g]), sum(s[i] for i in g)) for g in groups(host)]


def tome_groups(seen, b, r):
    """Return the members of each group, the remaining token first, in ToMe's order: the rest of A, then B."""
    keys, P = mean_keys(seen, b), seen.prefix_count
    A, B = ([i for i in range(len(keys)) if (P + i) % 2 == odd] for odd in (0, 1))
    best = {i: max(B, key=lambda j: cosine(keys[i], keys[j])) for i in A}
    ranked = sorted(A, key=lambda i: -cosine(keys[i], keys[best[i]]))
    left = sorted(ranked[r:]) if P else ranked[r:]
    return [[i] for i in left] + [[j] + [i for i in ranked[:r] if best[i] == j] for j in B]


def tome(seen, b, r):
    x, s = numbers(seen, b)
    return [(mean([x[i] for i in g], [s[i] for i in g]), sum(s[i] for i in g)) for g in tome_groups(seen, b, r)]


@pytest.mark.parametrize("P", [0, 1, 2, 5])
@pytest.mark.parametrize(("N", "keep"), HALVES)
def test_tome_merges_what_the_loops_do_in_their_order(N, keep, P):
    seen = view(N=N, seed=N + keep, prefix_count=P)
    check(seen, ToMe().plan(seen, keep), lambda b: tome(seen, b, N - keep))


def test_equal_keys_merge_the_first_pairs():
    for P, target in ((1, [2, 2, 3, 2, 4, 0, 5, 1]), (2, [2, 2, 2, 3, 0, 4, 1, 5]), (0, [2, 2, 2, 3, 0, 4, 1, 5])):
        seen = view(1, 8, keys=torch.ones(1, 2, 8, 6), sizes=torch.ones(1, 8), prefix_count=P)
        assert ToMe().plan(seen, 6).target.tolist() == [target]


@pytest.mark.parametrize(
    ("changes", "depth", "first"),
    [({}, 12, 7), ({}, 24, 14), ({}, 4, 2), ({}, 3, 2), ({}, 1, 1), ({"merge_from": 0.0}, 12, 0),
     ({"merge_from": 1.0}, 12, 12), ({"merge_from": 0.5833}, 12, 7), ({"merge_from": 0.5}, 12, 6)],
    ids=str,
)  # fmt: skip
def test_tofu_merges_from_that_block_on(changes, depth, first):
    plans = [ToFu(**changes).plan(view(block=block, depth=depth), 12) for block in range(depth)]
    assert [isinstance(plan, Keep) for plan in plans] == [True] * first + [False] * (depth - first)


@pytest.mark.parametrize("P", [0, 1, 2])
@pytest.mark.parametrize("how", ["released", "paper", "dropped"])
@pytest.mark.parametrize(("N", "keep"), HALVES)
def test_tofu_keeps_one_or_the_mean_of_tomes_pairs(N, keep, how, P):
    """ToFu keeps of ToMe's pairs one or the mean at the length of the longest."""
    seen = view(N=N, seed=N + keep, prefix_count=P)
    changes = {"merge_from": 1.0} if how == "dropped" else {"merge_from": 0.0, "length": how}

    def token(x, s, group):
        plain = mean([x[i] for i in group], [1.0] * len(group))
        longest = max(math.hypot(*x[i]) for i in group)
        divisor = math.hypot(*(x[group[0]] if how == "released" else plain))
        return [c * longest / divisor for c in plain], sum(s[i] for i in group)

    def expected(b):
        x, s = numbers(seen, b)
        return [token(x, s, group[:1] if how == "dropped" else group) for group in tome_groups(seen, b, N - keep)]

    check(seen, ToFu(**changes).plan(seen, keep), expected, size_tolerance=1e-5)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("P", [0, 1])
@pytest.mark.parametrize(("N", "keep"), HALVES)
def test_ppt_drops_or_merges_by_the_spread_of_scores(N, keep, P, threshold):
    """PPT drops tokens of images with uneven scores and merges ToMe's pairs of the others."""
    values = torch.randn(3, 2, N, 5, generator=torch.Generator().manual_seed(N))
    seen = view(N=N, seed=N + keep, prefix_count=P, values=values)

    def expected(b):
        x, s = numbers(seen, b)
        lengths = [math.hypot(*values[b, :, i].flatten().tolist()) for i in range(N)]
        contributions = [a * length for a, length in zip(seen.attention[b].tolist(), lengths, strict=True)]
        if sum((g / sum(contributions) - 1 / N) ** 2 for g in contributions) / N * N**2 <= threshold:
            return tome(seen, b, N - keep)
        return [(x[i], s[i]) for i in sorted(sorted(range(N), key=lambda i: -contributions[i])[:keep])]

    check(seen, PPT(threshold=threshold).plan(seen, keep), expected)


def test_ppt_measures_the_variance_by_the_patches_at_the_input():
    attention = torch.ones(2, 16)
    attention[0, 5] += 6.0
    seen, later = (view(2, 16, values=torch.ones(2, 2, 16, 3), attention=attention) for _ in range(2))
    later.memory["patches"] = 8
    first, second = (PPT(threshold=1.0).plan(batch, 9).target for batch in (seen, later))
    assert bool((first[0] == -1).any()) and not bool((first[1] == -1).any()) and not bool((second == -1).any())
    assert seen.memory["patches"] == 16


@pytest.mark.parametrize("kind", DISPOSALS)
@pytest.mark.parametrize(("N", "keep"), [(17, 16), (17, 9), (17, 2), (16, 1)])
def test_what_scores_do_not_keep_is_disposed_of_by_the_equations(N, keep, kind):
    seen = view(N=N, seed=N + keep)
    plan = FeatureNorm(disposal=kind).plan(seen, keep)
    plan = Keep(plan.index.sort(dim=1).values, plan.fuse) if isinstance(plan, Keep) else plan  # as the harness does

    def expected(b):
        x, s = numbers(seen, b)
        ranked = sorted(range(N), key=lambda i: -math.hypot(*x[i]))
        stay = sorted(ranked[: keep - (kind == "fuse")])
        gone = [i for i in range(N) if i not in stay]
        rows = [(x[i], s[i]) for i in stay]
        if kind == "drop":
            return rows
        if kind == "fuse":
            return [*rows, (mean([x[i] for i in gone], [s[i] for i in gone]), sum(s[i] for i in gone))]
        host = {i: max(stay, key=lambda j: cosine(x[i], x[j])) for i in gone}
        if kind == "merge":
            return means(seen, b, [host.get(i, i) for i in range(N)])
        weights = {j: {j: math.e} | {i: math.exp(cosine(x[i], x[j])) for i in gone if host[i] == j} for j in stay}
        return [(mean([x[i] for i in w], list(w.values())), 1.0) for w in weights.values()]

    check(seen, plan, expected)


@pytest.mark.parametrize(
    ("changes", "block", "depth", "margin", "every"),
    [
        ({}, 0, 12, 0.75, True),
        ({}, 5, 12, 0.75 * 7 / 12, True),
        ({}, 6, 12, 0.375, False),
        ({}, 11, 12, 0.0625, False),
        ({}, 2, 5, 0.45, True),
        ({}, 3, 5, 0.3, False),
        ({"margin": 0.5}, 2, 4, 0.5, False),
        ({"margin": -0.2}, 1, 4, -0.2, True),
        ({"bipartite": 0.0}, 0, 12, 0.75, False),
        ({"bipartite": 7 / 12}, 6, 12, 0.375, True),
        ({"bipartite": 7 / 12}, 7, 12, 0.3125, False),
        ({"bipartite": 1.0, "margin": 0.0}, 3, 4, 0.0, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("N", "keep"), HALVES)
def test_pitome_merges_what_has_most_energy(N, keep, changes, block, depth, margin, every):
    seen, r = view(N=N, seed=N + keep, block=block, depth=depth), N - keep

    def expected(b):
        keys = mean_keys(seen, b)
        alike = [[cosine(k, l) for l in keys] for k in keys]
        energy = [sum(c - margin if c > margin else math.expm1(c - margin) for c in row) / N for row in alike]
        ranked = sorted(range(N), key=lambda i: -energy[i])
        ranked = ranked if every else ranked[: 2 * r]
        best = {i: max(ranked[1::2], key=lambda j: alike[i][j]) for i in ranked[::2]}
        goes = sorted(best, key=lambda i: -alike[i][best[i]])[:r]
        return means(seen, b, [best[i] if i in goes else i for i in range(N)])

    check(seen, PiToMe(**changes).plan(seen, keep), expected)


def weight_of(taus, x, s, a, i, j):
    top_i, top_s = 1 / min(a), 1 / min(s)
    alike = ((cosine(x[i], x[j]) + 1) / 2) ** (1 / taus[0])
    information = (1 / a[i] / top_i * (1 / a[j] / top_i)) ** (1 / taus[1])
    return alike * information * (1 / s[i] / top_s * (1 / s[j] / top_s)) ** (1 / taus[2])


@pytest.mark.parametrize("P", [0, 1, 2])
@pytest.mark.parametrize("taus", [(1.0, 20.0, 40.0), (5.0, 1.0, 2.0)])
@pytest.mark.parametrize(("N", "keep"), HALVES)
def test_mctf_merges_one_way_and_then_the_other(N, keep, taus, P):
    seen, r = view(N=N, seed=N + keep, prefix_count=P), N - keep

    def expected(b):
        (x, s), a = numbers(seen, b), seen.received_attention[b].double().tolist()
        members = {i: [i] for i in range(N)}
        A, B = ([i for i in range(N) if (P + i) % 2 == odd] for odd in (0, 1))
        for sources, hosts, number in ((A, B, r // 2), (B, A, r - r // 2)):
            there = [j for j in hosts if j in members]
            best = {i: max(there, key=lambda j: weight_of(taus, x, s, a, i, j)) for i in sources}
            ranked = sorted(sources, key=lambda i: -weight_of(taus, x, s, a, i, best[i]))
            for i in ranked[:number]:
                members[best[i]] += members.pop(i)
        groups = [members[j] for j in A if j in members] + [members[j] for j in ranked if j in members]
        return [(mean([x[i] for i in g], [a[i] * s[i] for i in g]), sum(s[i] for i in g)) for g in groups]

    names = ("tau_similarity", "tau_information", "tau_size")
    check(seen, MCTF(**dict(zip(names, taus, strict=True))).plan(seen, keep), expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("N", "keep"), [(17, 16), (17, 9), (17, 3), (16, 1)])
def test_diffrate_drops_the_last_ranks_and_merges_the_middle_ones(N, keep, share):
    seen = view(N=N, seed=N + keep)

    def expected(b):
        x, s = numbers(seen, b)
        ranked = sorted(range(N), key=lambda i: -float(seen.attention[b, i]))
        stay, goes = sorted(ranked[:keep]), ranked[keep : keep + round(share * (N - keep))]
        best = {i: max(stay, key=lambda j: cosine(x[i], x[j])) for i in goes}
        rows = []
        for j in stay:
            mine = [i for i in goes if best[i] == j]
            size = s[j] + sum(s[i] * max(0.0, cosine(x[i], x[j])) for i in mine)
            rows.append((mean([x[i] for i in [j, *mine]], [1.0] * (1 + len(mine))), size))
        return rows

    check(seen, DiffRate(merged=share).plan(seen, keep), expected, size_tolerance=1e-5)
