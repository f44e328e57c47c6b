import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sparsebench.look.agreement_picture import BOTH, INKS, draw, figure
from sparsebench.look.canvas import GONE
from sparsebench.look.compare import Agreement, Comparison, Side
from sparsebench.look.pictures import Scene
from sparsebench.measure.agreement import iou

RNG = np.random.default_rng(0)
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
    return np.asarray(figure(comparison()).axes[number].images[0].get_array())


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


def test_it_says_who_is_who_how_many_stay_and_how_far_they_agree() -> None:
    sheet = figure(comparison(stages=2))
    said = [text.get_text() for text in sheet.texts]
    assert {"A: attn_topk, macs 0.5", "B: random, macs 0.5", "after block 0", "after block 1"} <= set(said)
    assert said.count("A: 0-4 of 16") == 2 and said.count("IoU 0.33") == 4 and said.count("neither names a patch") == 2
    (legend,) = sheet.legends
    found = [text.get_text() for text in legend.get_texts()]
    assert found == ["kept by both", "kept by A only", "kept by B only", "removed", "what matters to the label"]


def test_the_same_comparison_gives_the_same_png() -> None:
    made = draw(comparison())
    assert made == draw(comparison())
    with Image.open(io.BytesIO(made)) as image:
        assert image.format == "PNG" and 600 < image.width < 2500


def test_the_picture_can_be_a_vector_graphic() -> None:
    assert draw(comparison(), "pdf").startswith(b"%PDF") and b"<svg" in draw(comparison(), "svg")
    assert draw(comparison(), "svg") == draw(comparison(), "svg")


@pytest.mark.parametrize("stages", [1, 3])
def test_no_text_is_on_another_or_on_a_picture_or_outside(stages: int) -> None:
    label = "a_strategy_with_a_long_name(some=parameter, other=2, and_another=0.25, and_a=last_one)"
    sheet = figure(comparison(stages, label, "a class of an unusually long name", 5 * f"{TITLE}, "))
    canvas: Any = sheet.canvas
    sheet.draw_without_rendering()
    things = [*sheet.texts, *sheet.axes, *sheet.legends]
    boxes = [thing.get_window_extent(canvas.get_renderer()) for thing in things]
    for i, one in enumerate(boxes):
        assert sheet.bbox.x0 <= one.x0 and one.x1 <= sheet.bbox.x1
        assert sheet.bbox.y0 <= one.y0 and one.y1 <= sheet.bbox.y1
        for other in boxes[i + 1 :]:
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            down = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert across <= 0.5 or down <= 0.5
