import numpy as np
import pytest

from sparsebench.deploy import compare
from sparsebench.deploy.compare import BOTH, INKS, Agreement, Comparison, Side
from sparsebench.deploy.pictures import GONE, Scene
from sparsebench.deploy.show_tokens import paint
from sparsebench.measure.selection import iou

RNG = np.random.default_rng(0)
GRID = (4, 4)
SCALE = 256 // 16  # pictures of 16 pixels are enlarged to 256
NOTHING = np.zeros((16, 16), bool)


def picture() -> np.ndarray:
    return RNG.integers(0, 200, (16, 16, 3)).astype(np.uint8)


def pixels(large: np.ndarray, patch: int, inset: int = 5) -> np.ndarray:
    """Return the pixels of a patch without its rim."""
    side = 4 * SCALE
    top, left = side * (patch // 4), side * (patch % 4)
    return large[top + inset : top + side - inset, left + inset : left + side - inset]


def test_patches_that_are_gone_are_greyed_and_others_are_as_they_were() -> None:
    small, token = picture(), np.full(16, -1)
    token[[0, 5, 15]] = [0, 1, 2]
    plain, large = paint(small, NOTHING), paint(small, NOTHING, token, GRID)
    assert (plain[::SCALE, ::SCALE] == small).all() and plain.shape == (256, 256, 3)
    for patch in range(16):
        now, before = pixels(large, patch, inset=0), pixels(plain, patch, inset=0)
        if patch in (0, 5, 15):
            assert (now == before).all()
        else:
            assert np.abs(now.astype(float) - GONE).max() < 256 / 8 + 1


PICTURES = RNG.integers(0, 200, (3, 16, 16, 3)).astype(np.uint8)
A, B = [0, 1, 2, 7], [1, 2, 3, 4]


def masks(patches: list[int], n: int = 5) -> np.ndarray:
    return np.tile(np.isin(np.arange(16), patches), (n, 1))


TITLE = "composite, vit, 600 training samples"


def comparison(stages: int = 1, label: str = "attn_topk", name: str = "a cat", title: str = TITLE) -> Comparison:
    rows = np.array([0, 2, 4])
    kept = (masks(A), masks(B))
    kept[0][4], kept[1][4] = False, False
    stage = [Agreement(block, kept, iou(*kept), np.full(5, 0.2), None, None) for block in range(stages)]
    scene = Scene(title, (4, 4), PICTURES, np.zeros((3, 16, 16), bool), [name] * 3,
                  np.zeros(3, int), ("cat",))  # fmt: skip
    return Comparison(None, (Side(label, "macs 0.5"), Side("random", "macs 0.5")), stage, rows, scene)  # type: ignore[arg-type]


def panel(number: int) -> np.ndarray:
    """Return the pixels of one panel of the figure: the 3 pictures come first, then A on each, then B."""
    return np.asarray(compare.figure(comparison()).axes[number].images[0].get_array())


def patch(large: np.ndarray, number: int, inset: int = 6) -> np.ndarray:
    side = large.shape[0] // 4
    top, left = side * (number // 4), side * (number % 4)
    return large[top + inset : top + side - inset, left + inset : left + side - inset].astype(float)


@pytest.mark.parametrize(("first", "own", "other", "side"), [(3, A, B, 0), (6, B, A, 1)])
def test_patches_are_coloured_by_who_keeps_them(first: int, own: list[int], other: list[int], side: int) -> None:
    plain, large = panel(0), panel(first)
    for number in range(16):
        was, now = patch(plain, number), patch(large, number)
        if number not in own:
            assert np.abs(now - GONE).max() < 256 / 8 + 1
            continue
        ink = INKS[BOTH if number in other else side]
        assert np.abs(now - (1 - ink.strength) * was - ink.strength * ink.colour).max() <= 1
    rim = large[0, large.shape[1] // 8 + 16 * 4]  # in the outline of patch 1, which both keep
    assert (rim == INKS[BOTH].colour).all()
