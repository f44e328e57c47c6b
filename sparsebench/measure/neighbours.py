"""Whether patches that are alike to a model are neighbours in the image."""

from __future__ import annotations

import numpy as np

from sparsebench.errors import UnsupportedError


def neighbour_agreement(similarity: np.ndarray, grid: tuple[int, int], order: np.ndarray | None = None) -> float:
    """Return the share of a patch's neighbours that are among its most similar patches, mean over patches.

    A patch has the k = 2, 3 or 4 neighbours above, below, left and right of it in the image (1 or 2 where the grid is
    a line), and is compared with as many positions: the other ones with the largest similarity in its row. Equal ones
    are decided by position. A similarity that says nothing has k / (N - 1). After the patch association of Jelassi,
    Sander and Li (NeurIPS 2022), with the neighbours of a patch in place of its set.

    Args:
        similarity: (N, N), row i of position i to each position; its diagonal is not read.
        grid: (rows, columns) of the image's patches, N of them.
        order: (N,) the place in plain order, row by row, of the patch that each position shows; None for plain order.

    Raises:
        UnsupportedError: there is only one patch.
    """
    rows, columns = grid
    N = rows * columns
    if N < 2:
        raise UnsupportedError("an image of one patch has no neighbours; make patches smaller")
    row, column = np.divmod(np.arange(N) if order is None else order, columns)
    near = abs(row[:, None] - row) + abs(column[:, None] - column) == 1
    others = np.where(np.eye(N, dtype=bool), -np.inf, similarity)
    ranked = np.argsort(-others, axis=1, kind="stable")
    k = near.sum(axis=1)
    hits = np.take_along_axis(near, ranked, axis=1) & (np.arange(N) < k[:, None])
    return float((hits.sum(axis=1) / k).mean())
