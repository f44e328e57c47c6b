import numpy as np
import pytest

from sparsebench.deploy import compare
from sparsebench.deploy.compare import BOTH, INKS, Comparison
from sparsebench.deploy.pictures import BESIDE, GONE, Scene, rgb
from sparsebench.deploy.show_tokens import paint
from sparsebench.training.loop import Choice

RNG = np.random.default_rng(0)
GRID = (4, 4)
PICTURES = RNG.integers(0, 200, (3, 16, 16, 3)).astype(np.uint8)
NOTHING = np.zeros((3, 16, 16), bool)
A, B = [0, 1, 2, 7], [1, 2, 3, 4]


def patch(large: np.ndarray, number: int, inset: int = 6) -> np.ndarray:
    """Return the pixels of a patch without its rim."""
    side = large.shape[0] // 4
    top, left = side * (number // 4), side * (number % 4)
    return large[top + inset : top + side - inset, left + inset : left + side - inset].astype(float)


def test_patches_that_are_gone_are_greyed_and_others_are_as_they_were() -> None:
    small, token = PICTURES[0], np.full(16, -1)
    token[[0, 5, 15]] = [0, 1, 2]
    plain, large = paint(small, NOTHING[0]), paint(small, NOTHING[0], token, GRID)
    assert (plain[::16, ::16] == small).all() and plain.shape == (256, 256, 3)  # pictures of 16 pixels are enlarged
    for number in range(16):
        now, before = patch(large, number, inset=0), patch(plain, number, inset=0)
        assert (now == before).all() if number in (0, 5, 15) else np.abs(now - rgb(GONE)).max() < 256 / 8 + 1


def masks(patches: list[int], n: int = 5) -> np.ndarray:
    return np.tile(np.isin(np.arange(16), patches), (n, 1))


def panel(axes: int, column: int) -> np.ndarray:
    """Return the first picture of a column of a comparison: those of axes 0 are plain, those of axes 1 are A and B."""
    kept, rows = (masks(A), masks(B)), np.array([0, 2, 4])
    kept[0][4], kept[1][4] = False, False
    a, b = (Choice(0, one, one, scored=False) for one in kept)
    scene = Scene("composite, vit", GRID, PICTURES, NOTHING, ["a cat"] * 3, np.zeros(3, int), ("cat",))
    sides = (("attn_topk", "macs 0.5"), ("random", "macs 0.5"))
    made = compare.figure(Comparison(None, sides, {0: (a, b)}, None, rows, scene))  # type: ignore[arg-type]
    return np.asarray(made.axes[axes].images[0].get_array())[:256, column * int(256 * (1 + BESIDE)) :][:, :256]


@pytest.mark.parametrize(("own", "other", "side"), [(A, B, 0), (B, A, 1)])
def test_patches_are_coloured_by_who_keeps_them(own: list[int], other: list[int], side: int) -> None:
    plain, large = panel(0, 0), panel(1, side)
    for number in range(16):
        was, now = patch(plain, number), patch(large, number)
        if number not in own:
            assert np.abs(now - rgb(GONE)).max() < 256 / 8 + 1
            continue
        ink = INKS[BOTH if number in other else side]
        assert np.abs(now - (1 - ink.strength) * was - ink.strength * rgb(ink.colour)).max() <= 1
    rim = large[0, large.shape[1] // 8 + 16 * 4]  # in the outline of patch 1, which both keep
    assert (rim == rgb(INKS[BOTH].colour)).all()
