"""Shipped strategies: entry points and kinds, and those that score tokens against plain loops in float64."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from sparsebench_plugins.noise import ROUNDING
from tiny import ENTRIES, ROOT, SHIPPED, B, N, act, chosen, images, inside, made, vit
from token_sets import OneLayer, Sets

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.strategy.base import KINDS
from sparsebench.tasks.images import Composite

CLASS = partial(vit, reg_tokens=2)
CLASSLESS = partial(vit, class_token=False, global_pool="avg")


def class_attention(s, b, j, P, classless=False):
    """Return a_j, mean over heads; without a class token the attention that j receives, mean over queries."""
    H, T = s["A"].shape[1], s["A"].shape[2]
    rows = range(T) if classless else (0,)
    return sum(s["A"][b, h, i, P + j] for h in range(H) for i in rows) / (H * len(rows))


def mean_query(s, b, j, P):
    H, T, d = s["q"].shape[1:]
    total = 0.0
    for h in range(H):
        q = [sum(s["q"][b, h, i, c] for i in range(P, T)) / (T - P) for c in range(d)]
        logits = [sum(q[c] * s["k"][b, h, i, c] for c in range(d)) / math.sqrt(d) for i in range(T)]
        total += math.exp(logits[P + j]) / sum(map(math.exp, logits)) / H
    return total


def value_norm(s, b, j, P):
    return math.sqrt(sum(float(x) ** 2 for x in s["v"][b, :, P + j].flatten()))


def ats(s, b, j, P, classless=False):
    contributions = [class_attention(s, b, i, P, classless) * value_norm(s, b, i, P) for i in range(N)]
    return contributions[j] / sum(contributions)


def feature_norm(s, b, j, P):
    return math.sqrt(sum(float(x) ** 2 for x in s["tokens"][b, P + j]))


def rep_shift(s, b, j, P):
    return math.sqrt(sum(float(x) ** 2 for x in s["branch"][b, P + j]))


def column_norm(n, s, b, j, P):
    H, T = s["A"].shape[1], s["A"].shape[2]
    return sum(sum(s["A"][b, h, i, P + j] ** n for i in range(T)) ** (1 / n) for h in range(H)) / H


CASES = [
    ("attn_topk:attention=mean_query", CLASS, mean_query),
    ("attn_topk:attention=mean_query", CLASSLESS, mean_query),
    ("attn_topk", CLASS, class_attention),
    ("attn_topk:attention=received", CLASS, partial(class_attention, classless=True)),
    ("attn_topk", CLASSLESS, partial(class_attention, classless=True)),
    ("tps", CLASS, class_attention),
    ("evit", CLASS, class_attention),
    ("evit", CLASSLESS, partial(class_attention, classless=True)),
    ("value_norm", CLASS, value_norm),
    ("value_norm:keep=smallest", CLASS, lambda *a: -value_norm(*a)),
    ("attn_value_norm", CLASS, ats),
    ("attn_value_norm", CLASSLESS, partial(ats, classless=True)),
    ("feature_norm", CLASS, feature_norm),
    ("feature_norm:keep=smallest", CLASS, lambda *a: -feature_norm(*a)),
    ("rep_shift:change=attention", CLASS, rep_shift),
    ("column_norm", CLASS, partial(column_norm, 2.0)),
    ("column_norm:n=5.5", CLASSLESS, partial(column_norm, 5.5)),
]


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize(("words", "make", "score"), CASES)
def test_scores_are_the_equations_and_the_largest_stay(words, make, score, block):
    strategy, network = made(words), make()
    shown = inside(network, images(), block)
    expected = np.array([[score(shown, b, j, network.prefix) for j in range(N)] for b in range(B)])
    acting, _ = act(strategy, network, images(), blocks=(block,))
    (decision,) = acting.decisions
    np.testing.assert_allclose(decision.plan.scores, expected, rtol=1e-5, atol=1e-7)
    if strategy.name == "tps":
        assert (decision.plan.weight > 0).sum(dim=(1, 2)).tolist() == [N] * B
    else:
        stay = N // 2 - strategy.traits().fuses
        assert decision.plan.index.tolist() == [chosen(row, stay) for row in expected]


def test_a_high_order_of_the_norm_is_the_largest_entry():
    """A high order of the column norm is the largest entry and no power vanishes."""
    shown = inside(vit(), images(), 1)
    acting, _ = act(made("column_norm:n=1000"), vit(), images(), blocks=(1,))
    np.testing.assert_allclose(acting.scores, shown["A"][..., 1:].max(axis=2).mean(axis=1), rtol=5e-3)


LAPLACE = ((1, -2, 1), (-2, 4, -2), (1, -2, 1))


def patch(pixels, b, j):
    """Return the (3, 8, 8) pixels of a patch."""
    r, c = divmod(j, 4)
    return pixels[b, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8].double().numpy()


def variance(P):
    return sum(sum((x - channel.mean()) ** 2 for x in channel.flatten()) / channel.size for channel in P) / len(P)


def energy(P):
    across = [(P[c, y, x + 1] - P[c, y, x]) ** 2 for c in range(3) for y in range(8) for x in range(7)]
    down = [(P[c, y + 1, x] - P[c, y, x]) ** 2 for c in range(3) for y in range(7) for x in range(8)]
    return sum(across) / len(across) + sum(down) / len(down)


def sigma(P):
    answers = [
        abs(sum(LAPLACE[i][k] * P[c, y + i, x + k] for i in range(3) for k in range(3)))
        for c in range(3) for y in range(6) for x in range(6)
    ]  # fmt: skip
    return math.sqrt(math.pi / 2) * sum(answers) / len(answers) / 6


PIXELS = [
    ("patch_variance", variance),
    ("gradient_energy", energy),
    ("noise", lambda P: -sigma(P)),
    ("noise:by=ratio", lambda P: -(sigma(P) ** 2) / max(variance(P), ROUNDING)),
]


@pytest.mark.parametrize(("words", "score"), PIXELS)
def test_scores_of_pixels_are_the_equations_and_the_largest_stay(words, score):
    pixels = images()
    pixels[0, :, :16] = pixels[0, :, :16] * 0.1 + torch.linspace(0, 0.8, 32)
    expected = np.array([[score(patch(pixels, b, j)) for j in range(N)] for b in range(B)])
    acting, _ = act(made(words), vit(), pixels)
    np.testing.assert_allclose(acting.scores, expected, rtol=1e-5, atol=1e-7)
    assert acting.index.tolist() == [chosen(row, 8) for row in expected]


@pytest.mark.parametrize(("name", "side"), [("noise", 2), ("gradient_energy", 1)])
def test_patches_too_small_to_tell_are_unsupported(name, side):
    network = vit(img_size=4 * side, patch_size=side)
    with pytest.raises(UnsupportedError, match="pixels a side"):
        act(made(name), network, torch.rand(1, 3, 4 * side, 4 * side))


ITERATIONS = (30, 5, 5, 1)  # of the four blocks


def ranks(A, iterations, low, high):
    """Return one sample's s for all tokens from A (H, T, T), and the number of heads that are used."""
    H, T = A.shape[:2]
    each = []
    for h in range(H):
        s = [1 / T] * T
        for _ in range(iterations):
            s = [sum(A[h, i, j] * s[i] for i in range(T)) for j in range(T)]
        if low <= sum((x * T - 1) ** 2 for x in s) / T <= high:
            each.append(s)
    if not each:
        return ranks(A, iterations, 0, math.inf)[0], 0
    return [math.sqrt(sum(s[j] ** 2 for s in each) / len(each)) for j in range(T)], len(each)


def stay(s, keys, keep, similar, groups):
    """Return the patches of one sample that stay, from s of the patches and keys (N, C)."""
    order = sorted(range(len(s)), key=lambda j: (-s[j], j))
    half = (len(s) + 1) // 2
    first, second = (order[::2], order[1::2]) if groups == "alternate" else (order[:half], order[half:])

    def closest(j):
        return max(float(keys[i] @ keys[j]) / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]) for i in first)

    go = sorted(second, key=lambda j: -closest(j))[: min(round(similar * (len(s) - keep)), len(s) // 2)]
    left = [-1.0 if j in go else s[j] for j in range(len(s))]
    return chosen(left, keep)


RANKED = ("", ":groups=rank", ":similar=1.0", ":similar=0.0", ":low=0.1,high=0.4", ":low=5.0,high=6.0")
"""The last two use few heads, and no head."""


@pytest.mark.parametrize(
    ("params", "block", "keep"),
    [*((params, 1, 3) for params in RANKED), *((params, 3, 13) for params in RANKED), ("", 0, 3)],
)
def test_it_keeps_what_the_equations_keep(params, block, keep):
    strategy, network = made(f"zero_tprune{params}"), vit(reg_tokens=1)
    shown = inside(network, images(), block)
    acting, _ = act(strategy, network, images(), blocks=(block,), rate=keep / N)
    for b in range(B):
        s, _ = ranks(shown["A"][b], ITERATIONS[block], strategy.low, strategy.high)
        keys = np.concatenate(list(shown["k"][b]), axis=1)[2:]
        np.testing.assert_allclose(acting.scores[b], s[2:], rtol=1e-5)
        assert acting.index[b].tolist() == stay(s[2:], keys, keep, strategy.similar, strategy.groups)


BIG = {"img_size": 64, "depth": 1}  # 8 x 8 patches


def drawn(n, keep, cell, rows=8, columns=8):
    """Return (n, cells) numbers of tokens that stay in the cells of n samples, and the (n, N) mask of these tokens."""
    network = vit(**(BIG | {"img_size": (8 * rows, 8 * columns)}))
    tokens = rows * columns
    pixels = torch.zeros(1, 3, 8 * rows, 8 * columns).expand(n, -1, -1, -1)
    acting, _ = act(made(f"random:stratified=true,cell={cell}"), network, pixels, rate=keep / tokens)
    kept = np.zeros((n, tokens), dtype=bool)
    np.put_along_axis(kept, acting.index.numpy(), True, axis=1)
    assert (kept.sum(axis=1) == keep).all()
    cells = {}
    for j in range(tokens):
        cells.setdefault((j // columns // cell, j % columns // cell), []).append(j)
    return np.stack([kept[:, members].sum(axis=1) for members in cells.values()], axis=1), kept


@pytest.mark.parametrize(("keep", "cell"), [(10, 2), (40, 2), (48, 2), (30, 4), (60, 3)])
def test_stratified_takes_as_large_a_share_of_every_cell(keep, cell):
    of_cell, _ = drawn(50, keep, cell)
    full = of_cell[:, 0]
    expected = keep * cell**2 / 64
    assert full.min() >= np.floor(expected) and full.max() <= np.ceil(expected)


def test_stratified_keeps_every_token_equally_often():
    """Stratified keeps every token equally often though cells at the border are smaller."""
    of_cell, kept = drawn(2000, 17, 2, rows=5, columns=7)
    assert of_cell.shape[1] == 12
    np.testing.assert_allclose(kept.mean(axis=0), 17 / 35, atol=0.05)


@pytest.mark.parametrize("words", ["random:stratified=true", "radial"])
def test_tokens_without_a_grid_are_unsupported(words):
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(3, 0, {})
    with pytest.raises(UnsupportedError, match="tokens without a grid"):
        act(made(words), OneLayer(m=8).build(data, 0), torch.from_numpy(data.train.inputs))


@pytest.mark.parametrize("p", [1, 2, "inf"])
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5)])
def test_radial_keeps_the_nearest_to_the_centre(p, rows, columns):
    network = vit(img_size=(8 * rows, 8 * columns))
    order = np.inf if p == "inf" else p
    scores = [
        -np.linalg.norm([r - (rows - 1) / 2, c - (columns - 1) / 2], ord=order)
        for r in range(rows)
        for c in range(columns)
    ]
    pixels = torch.rand(2, 3, 8 * rows, 8 * columns)
    for keep in (1, 2, 5, 9, rows * columns - 1):
        acting, _ = act(made(f"radial:p={p}"), network, pixels, rate=keep / (rows * columns), blocks=(1,))
        assert acting.index.tolist() == [chosen(scores, keep)] * 2
    np.testing.assert_allclose(acting.scores[0], scores, rtol=1e-6)


def test_radial_counts_a_fused_token_as_the_farthest_and_never_mixes_them():
    acting, _ = act(made("radial:disposal=fuse"), vit(), images(), blocks=(1, 2))
    assert acting.decisions[1].before[:, -1].tolist() == [-1] * B
    assert acting.decisions[1].plan.scores.argmin(dim=1).tolist() == [N // 2 - 1] * B
    with pytest.raises(UserError, match="'radial' does not take this disposal of tokens; got disposal=squeeze"):
        made("radial:disposal=squeeze")


def test_each_file_of_a_strategy_has_an_entry_point():
    assert {path.stem for path in (ROOT / "plugins/sparsebench_plugins").glob("*.py")} - {"__init__"} == set(ENTRIES)


def test_kinds_are_as_published():
    assert {name: cls.kind for name, cls in SHIPPED.items() if cls.kind != "deployable"} == {
        "dense": "baseline", "random": "baseline", "random_inside": "baseline", "radial": "baseline",
        "downsample": "baseline", "patch_dropout": "baseline", "perturbation": "baseline", "oracle": "oracle",
        "anti_oracle": "oracle",
    }  # fmt: skip
    assert {cls.kind for cls in SHIPPED.values()} == set(KINDS)
    assert [name for name, cls in SHIPPED.items() if not cls.budgeted] == ["dense"]
    assert [name for name, cls in SHIPPED.items() if cls.trains_only] == ["patch_dropout"]


def masks(share):
    """Return (B, N) relevance: random tokens have this share each, the others none."""
    order = torch.rand(B, N, generator=torch.Generator().manual_seed(2)).argsort(dim=1)
    return torch.zeros(B, N).scatter(1, order[:, :5], share)


@pytest.mark.parametrize("share", [1.0, 1 / 1024])
@pytest.mark.parametrize("rate", [3 / 16, 0.5])
def test_the_oracle_keeps_what_matters_first(share, rate):
    """The oracle keeps what matters first and the anti oracle removes it first."""
    mask, network, M = masks(share), vit(), round(rate * 16)
    for name, relevant in (("oracle", min(5, M)), ("anti_oracle", max(0, M - 11))):
        acting, _ = act(made(name), network, images(), mask, rate)
        assert acting.index.shape == (B, M)
        assert (mask.gather(1, acting.index) > 0).sum(1).tolist() == [relevant] * B


def test_the_oracle_orders_partly_covered_patches_by_their_share():
    data = Composite(canvas=32, foreground=19, test=1).draw(40, 0, {})
    network = vit()
    relevance = torch.from_numpy(data.train.relevance_on(network.grid))
    assert len(relevance.unique()) > 5
    for name, sign in (("oracle", 1), ("anti_oracle", -1)):
        acting, _ = act(made(name), network, torch.from_numpy(data.train.inputs), relevance)
        kept = (sign * relevance).gather(1, acting.index).sum(1)
        best = (sign * relevance).sort(dim=1, descending=True).values[:, :8].sum(1)
        torch.testing.assert_close(kept, best)


@pytest.mark.parametrize("name", ["oracle", "anti_oracle", "random"])
def test_equals_are_drawn_at_random_for_each_sample(name):
    items = torch.arange(300)
    acting, _ = act(made(name), vit(depth=1), images(1).expand(300, -1, -1, -1), torch.full((300, N), 0.5), items=items)
    assert len({tuple(row) for row in acting.index.tolist()}) > 250
    often = torch.bincount(acting.index.flatten(), minlength=N)
    assert int(often.min()) > 110 and int(often.max()) < 190


def test_noise_drops_tokens_of_unusual_length_where_there_are_no_pixels():
    data = Sets(tokens=10, d=6, relevant=0.4, confusion=0.1).draw(3, 0, {})
    network = OneLayer(m=8).build(data, 0)
    tokens = torch.from_numpy(data.train.inputs).clone()
    tokens[0, [2, 5]] *= 3
    tokens[1, [0, 9]] *= 0.2
    tokens[2, 1] *= 2
    tokens[2, 8] *= 0.5
    acting, _ = act(made("noise"), network, tokens, rate=0.8)
    removed = [sorted(set(range(10)) - set(row)) for row in acting.index.tolist()]
    assert removed == [[2, 5], [0, 9], [1, 8]]


def test_class_attention_without_a_class_token_is_unsupported():
    with pytest.raises(UnsupportedError, match="'attn_topk' needs class_attention"):
        act(made("attn_topk:attention=class"), vit(class_token=False, global_pool="avg"), images(), blocks=(1,))
