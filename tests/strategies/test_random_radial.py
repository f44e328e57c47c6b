"""Scores that look at no image: drawn, or by the place alone."""

import numpy as np
import pytest
import torch
from sparsebench_plugins.radial import Radial
from sparsebench_plugins.random import Random
from tiny import B, N, act, chosen, images, vit
from token_sets import OneLayer, Sets

from sparsebench.errors import UnsupportedError, UserError

BIG = {"img_size": 64, "depth": 1}  # 8 x 8 patches


def drawn(n, keep, cell, rows=8, columns=8):
    """Return (n, cells) how many tokens of each cell stay in n samples, and the (n, N) mask of those that stay."""
    network = vit(**(BIG | {"img_size": (8 * rows, 8 * columns)}))
    tokens = rows * columns
    pixels = torch.zeros(1, 3, 8 * rows, 8 * columns).expand(n, -1, -1, -1)
    acting, _ = act(Random(stratified=True, cell=cell), network, pixels, rate=keep / tokens)
    kept = np.zeros((n, tokens), dtype=bool)
    np.put_along_axis(kept, acting.index.numpy(), True, axis=1)
    assert (kept.sum(axis=1) == keep).all()
    cells = {}
    for j in range(tokens):
        cells.setdefault((j // columns // cell, j % columns // cell), []).append(j)
    return np.stack([kept[:, members].sum(axis=1) for members in cells.values()], axis=1), kept


def test_stratified_keeps_one_token_of_every_cell_at_random():
    of_cell, kept = drawn(300, 16, 2)
    assert (of_cell == 1).all()
    assert len({row.tobytes() for row in kept}) > 290
    assert kept.mean(axis=0).min() > 0.15 and kept.mean(axis=0).max() < 0.35


@pytest.mark.parametrize(("keep", "cell"), [(10, 2), (40, 2), (48, 2), (30, 4), (60, 3)])
def test_stratified_takes_as_large_a_share_of_every_cell(keep, cell):
    of_cell, _ = drawn(50, keep, cell)
    full = of_cell[:, 0]
    expected = keep * cell**2 / 64
    assert full.min() >= np.floor(expected) and full.max() <= np.ceil(expected)


def test_stratified_keeps_every_token_equally_often_though_cells_at_the_border_are_smaller():
    of_cell, kept = drawn(2000, 17, 2, rows=5, columns=7)
    assert of_cell.shape[1] == 12
    np.testing.assert_allclose(kept.mean(axis=0), 17 / 35, atol=0.05)


@pytest.mark.parametrize("strategy", [Random(stratified=True), Radial()], ids=lambda s: s.name)
def test_tokens_without_a_grid_are_unsupported(strategy):
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(3, 0, {})
    with pytest.raises(UnsupportedError, match=f"{strategy.name}: tokens without a grid"):
        act(strategy, OneLayer(m=8).build(data, 0), torch.from_numpy(data.train.inputs))


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
    for keep in range(1, rows * columns):
        acting, _ = act(Radial(p=p), network, pixels, rate=keep / (rows * columns), blocks=(1,))
        assert acting.index.tolist() == [chosen(scores, keep)] * 2
    np.testing.assert_allclose(acting.scores[0], scores, rtol=1e-6)


def test_radial_counts_a_fused_token_as_the_farthest_and_never_mixes_them():
    acting, _ = act(Radial(disposal="fuse"), vit(), images(), blocks=(1, 2))
    assert acting.decisions[1].before[:, -1].tolist() == [-1] * B
    assert acting.decisions[1].plan.scores.argmin(dim=1).tolist() == [N // 2 - 1] * B
    with pytest.raises(UserError, match="'radial' does not take this disposal of tokens; got disposal=squeeze"):
        Radial(disposal="squeeze")
