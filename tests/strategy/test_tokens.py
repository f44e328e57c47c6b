from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebench.strategy import sorting, tokens
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Shift

KINDS = ("keep", "fuse", "merge", "weigh", "mix")
PREFIXES = (0, 1, 2, 5)


def make_plan(kind, rng, B, N, M):
    order = torch.stack([torch.randperm(N, generator=rng) for _ in range(B)])
    if kind == "keep":
        return Keep(order[:, :M])
    if kind == "fuse":
        return Keep(order[:, : M - 1], fuse=torch.rand(B, N, generator=rng, dtype=torch.float64))
    if kind == "merge":
        target = torch.randint(0, M, (B, N), generator=rng)
        return Merge(target.scatter(1, order[:, :M], torch.arange(M).expand(B, M)))
    if kind == "weigh":
        target = torch.randint(-1, M, (B, N), generator=rng)
        weight, added = torch.rand(2, B, N, generator=rng, dtype=torch.float64)
        return Merge(target.scatter(1, order[:, :M], torch.arange(M).expand(B, M)), weight=weight, sizes=added)
    return Mix(torch.randn(B, M, N, generator=rng, dtype=torch.float64))


def by_loops(plan, x, sizes, prefix):
    """Return tokens, sizes and patches after the plan, computed token by token from (B, P + N, C) tokens."""
    out, after, names = [], [], []
    for b in range(x.shape[0]):
        patches, N = x[b, prefix:], sizes.shape[1]
        rows, size, name = list(x[b, :prefix]), [], []
        if isinstance(plan, Keep):
            kept = plan.index[b].tolist()
            rows, size, name = rows + [patches[i] for i in kept], [sizes[b, i] for i in kept], list(kept)
            if plan.fuse is not None:
                left = [i for i in range(N) if i not in kept]
                rows.append(sum((plan.fuse[b, i] * patches[i] for i in left), 0 * patches[0]))
                size, name = [*size, sum(sizes[b, left])], [*name, -1]
        elif isinstance(plan, Merge):
            for group in range(int(plan.target[b].max()) + 1):
                members = [i for i in range(N) if plan.target[b, i] == group]
                mean = sizes[b] / sum(sizes[b, i] for i in members)
                weight = mean if plan.weight is None else plan.weight[b]
                rows.append(sum(weight[i] * patches[i] for i in members))
                size.append(sum((sizes if plan.sizes is None else plan.sizes)[b, members]))
                name.append(members[0])
        else:
            rows += [sum(weights[i] * patches[i] for i in range(N)) for weights in plan.weight[b]]
            size, name = [1.0] * plan.weight.shape[1], [-1] * plan.weight.shape[1]
        out.append(torch.stack(rows))
        after.append([float(value) for value in size])
        names.append(name)
    return torch.stack(out), torch.tensor(after, dtype=sizes.dtype), torch.tensor(names)


@st.composite
def cases(draw, kinds=KINDS):
    kind = draw(st.sampled_from(kinds))
    B, N, C = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    M = draw(st.integers(1, N))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    sizes = torch.randint(1, 5, (B, N), generator=rng).double()
    return make_plan(kind, rng, B, N, M), sizes, draw(st.sampled_from(PREFIXES)), C, rng


@given(cases())
@settings(max_examples=150, deadline=None)
def test_a_plan_equals_a_loop_over_its_tokens(case):
    plan, sizes, prefix, C, rng = case
    B, N = sizes.shape
    x = torch.randn(B, prefix + N, C, generator=rng, dtype=torch.float64)
    expected, after, names = by_loops(plan, x, sizes, prefix)
    torch.testing.assert_close(tokens.apply(plan, x, sizes, prefix), expected)
    torch.testing.assert_close(tokens.sizes_after(plan, sizes), after)
    index = torch.arange(N).expand(B, N)
    assert torch.equal(tokens.index_after(plan, index), names)
    assert torch.equal(tokens.index_after(plan, 3 * index + 1), torch.where(names < 0, -1, 3 * names + 1))


REALS = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, torch.inf, -torch.inf, torch.nan])
TYPES = {
    torch.float32: REALS,
    torch.float16: REALS,
    torch.int64: st.integers(-3, 3),
    torch.bool: st.booleans(),
}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@given(data=st.data())
def test_comparisons_sort_as_torch_does(dtype, descending, data):
    rows = st.lists(TYPES[dtype], min_size=7, max_size=7)
    values = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=3)), dtype=dtype)
    order = values.sort(dim=-1, descending=descending, stable=True)
    by_comparisons = sorting._by_comparisons(values, descending)
    assert torch.equal(by_comparisons.indices, order.indices)
    torch.testing.assert_close(by_comparisons.values, order.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefix_tokens_stay_bit_for_bit_in_front_of_the_counted_ones(kind, prefix):
    rng = torch.Generator().manual_seed(prefix)
    plan = make_plan(kind, rng, 2, 7, 4)
    x = torch.randn(2, prefix + 7, 3, generator=rng)
    out = tokens.apply(plan, x, torch.ones(2, 7), prefix)
    assert out.shape == (2, prefix + 4, 3)
    assert torch.equal(out[:, :prefix], x[:, :prefix])


def test_merging_into_hosts_keeps_the_order_of_hosts():
    assert Merge.into(torch.tensor([[3, 1, 1, 3], [0, 0, 2, 3]])).target.tolist() == [[1, 0, 0, 1], [0, 0, 1, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_tokens_and_their_weights(kind):
    weights = {"fuse": "fuse", "weigh": "weight", "mix": "weight"}.get(kind)
    rng = torch.Generator().manual_seed(0)
    plan = make_plan(kind, rng, 2, 6, 3)
    x = torch.randn(2, 6, 2, generator=rng, dtype=torch.float64, requires_grad=True)

    def changed(x, *weight):
        new = replace(plan, **{weights: weight[0]}) if weight else plan
        return tokens.apply(new, x, torch.ones(2, 6).double())

    weight = () if weights is None else (getattr(plan, weights).requires_grad_(),)
    assert torch.autograd.gradcheck(changed, (x, *weight))


def test_gather_takes_the_rows_of_each_sample():
    """Gather takes the rows of each sample and its gradient reaches only them."""
    x = torch.arange(12.0).reshape(2, 3, 2).requires_grad_()
    out = tokens.gather(x, torch.tensor([[2, 0], [1, 1]]))
    assert out.tolist() == [[[4, 5], [0, 1]], [[8, 9], [8, 9]]]
    out.sum().backward()
    assert x.grad[:, :, 0].tolist() == [[1, 0, 1], [0, 2, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_keep_their_dtype(kind):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 4, generator=rng).bfloat16()
    assert tokens.apply(make_plan(kind, rng, 2, 6, 3), x, torch.ones(2, 6), 1).dtype == torch.bfloat16


@given(cases(("keep", "fuse", "merge", "weigh")), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_patches_are_assigned_to_the_token_that_contains_them(case, seed):
    plan, sizes, _, _, _ = case
    B, N = sizes.shape
    token = torch.randint(-1, N, (B, 11), generator=torch.Generator().manual_seed(seed))
    membership = tokens.membership_after(plan, token, N)
    for b, old in enumerate(token.tolist()):
        for patch, place in enumerate(old):
            if isinstance(plan, Merge):
                goes = -1 if place < 0 else int(plan.target[b, place])
            else:
                kept = plan.index[b].tolist()
                fused = -1 if plan.fuse is None or place < 0 else len(kept)
                goes = kept.index(place) if place in kept else fused
            assert int(membership[b, patch]) == goes


@pytest.mark.parametrize("kind", ["merge", "weigh"])
def test_groups_are_summed_alike_in_an_exported_program(kind, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    plan, sizes = make_plan(kind, rng, 2, 6, 3), torch.rand(2, 6, generator=rng).double()
    x = torch.randn(2, 7, 4, generator=rng).double()
    expected = tokens.apply(plan, x, sizes, 1)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    torch.testing.assert_close(tokens.apply(plan, x, sizes, 1), expected)


@pytest.mark.parametrize("values", [None, torch.full((1, 3, 2), 7.0)], ids=["without values", "with values"])
def test_a_mask_may_replace_the_patches(values):
    x, keep = torch.arange(8.0).reshape(1, 4, 2), torch.tensor([[1.0, 0.0, 1.0]])
    out = tokens.apply(Mask(keep, values=values), x, torch.ones(1, 3), 1)
    assert torch.equal(out[:, :1], x[:, :1]) and torch.equal(out[:, 1:], x[:, 1:] if values is None else values)


def test_padding_in_a_boolean_mask_is_ignored():
    plan = tokens.Padded.of(Mask(torch.tensor([[True, False, True], [False, True, False]])))
    sizes, index = torch.tensor([[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]), torch.tensor([[4, 5, 6], [7, 8, 9]])
    assert plan.index.tolist() == [[0, 2], [1, -1]]
    assert tokens.sizes_after(plan, sizes).tolist() == tokens.values_at(sizes, plan.index).tolist() == [[2, 4], [6, 0]]
    assert tokens.index_after(plan, index).tolist() == [[4, 6], [8, -1]]
    patches = torch.eye(3).expand(2, 3, 3)
    after = tokens.patch_weights_after(plan, patches, sizes)
    assert after.tolist() == [[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 0, 0]]]


@pytest.mark.parametrize("prefix", [None, torch.full((1, 1, 2), 9.0)], ids=["patches", "prefix too"])
def test_a_shift_is_added(prefix):
    x, by = torch.arange(8.0).reshape(1, 4, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    out = tokens.apply(Shift(by, prefix=prefix), x, torch.ones(1, 3), 1)
    assert torch.equal(out, x + torch.cat([torch.zeros(1, 1, 2) if prefix is None else prefix, by], dim=1))
