import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sparsebench.look.canvas import GONE, MATTERS
from sparsebench.look.show_tokens import Pictures, Shown, Stage
from sparsebench.look.tokens_picture import RIGHT, WRONG, draw, figure, paint

RNG = np.random.default_rng(0)
N, GRID = 4, (4, 4)
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


def test_patches_that_share_a_token_are_tinted_and_outlined_in_its_colour() -> None:
    small, token = picture(), np.arange(16)
    token[[1, 2, 9]], token[[4, 8]] = 1, 4
    plain, large = paint(small, NOTHING), paint(small, NOTHING, token, GRID)
    for patch in set(range(16)) - {1, 2, 9, 4, 8}:
        assert (pixels(large, patch, inset=0) == pixels(plain, patch, inset=0)).all()
    first, other = ({tuple(pixels(large, patch, 0)[0, 30]) for patch in group} for group in ((1, 2, 9), (4,)))
    assert len(first) == len(other) == 1 and first != other  # the middle of the upper rim
    assert tuple(pixels(large, 1, 0)[30, -1]) not in first  # between 1 and 2 there is no line
    assert tuple(pixels(large, 9, 0)[30, -1]) in first
    for patch in (1, 9):
        moved = pixels(large, patch).astype(float) - 0.75 * pixels(plain, patch)
        assert np.abs(moved - 0.25 * np.array(first.copy().pop())).max() <= 1


def test_what_matters_is_outlined() -> None:
    small, box = picture(), NOTHING.copy()
    box[3:9, 2:12] = True
    large, plain = paint(small, box, np.full(16, -1), GRID), paint(small, NOTHING, np.full(16, -1), GRID)
    top, bottom, left, right = (SCALE * x for x in (3, 9, 2, 12))
    line = (large != plain).any(axis=2)
    assert (large[line] == MATTERS).all()
    assert line[top, left:right].all() and line[top:bottom, right - 1].all() and line[bottom - 1, left:right].all()
    assert not line[:top].any() and not line[top + 5 : bottom - 5, left + 5 : right - 5].any()


def stage(place: str, count: int) -> Stage:
    return Stage(place, count, np.where(np.arange(16) < count, np.arange(16), -1).repeat(N).reshape(16, N).T)


def pictures(*more: Shown, names: str = "a cat on grass") -> Pictures:
    shown = [
        Shown("attn_topk(attention=received)", "macs 0.5 @0,1,2", [stage("block 0", 9), stage("block 1", 4)],
              np.array([0, 1, 0, 1])),
        Shown("dense", "", [], np.array([0, 0, 0, 0])),
        Shown("a_strategy_with_a_long_name(some=parameter, other=2)", "keep 0.5 power-floor", [stage("the input", 8)],
              np.array([1, 1, 1, 1])),
        Shown("fails", "macs 0.5", [], np.empty(0, int), "ValueError: " + "words of what went wrong " * 20),
        *more,
    ]  # fmt: skip
    return Pictures(
        "composite, vit, 600 training samples", GRID, np.stack([picture() for _ in range(N)]),
        np.stack([NOTHING] * N), [names] * N, np.array([0, 1, 1, 0]), ("cat", "an automobile of a long name"), shown,
    )  # fmt: skip


def test_the_same_pictures_give_the_same_bytes() -> None:
    made = pictures()
    assert draw(made) == draw(made)
    with Image.open(io.BytesIO(draw(made))) as image:
        assert image.format == "PNG" and 600 < image.width < 2500


def texts(made: Pictures) -> dict[str, list[str]]:
    """Return the colours of each text, lines joined."""
    found: dict[str, list[str]] = {}
    for text in figure(made).texts:
        found.setdefault(text.get_text().replace("\n", " "), []).append(text.get_color())
    return found


def test_it_says_what_is_seen_and_what_the_network_says() -> None:
    found = texts(pictures())
    assert {"block 0: 9 of 16", "block 1: 4 of 16", "the input: 8 of 16", "all 16"} <= set(found)
    assert {"attn_topk(attention=received)", "dense", "fails", "macs 0.5 @0,1,2"} <= set(found)
    assert found["right: cat"] == [RIGHT] * 3 and found["wrong: cat"] == [WRONG] * 3  # of attn_topk and dense
    assert any(text.startswith("no result: ValueError: words of what") and text.endswith("...") for text in found)
    assert not any("share a token" in text for text in found)


def test_it_says_so_where_patches_share_a_token_or_are_mixed() -> None:
    merged = Stage("block 0", 2, np.arange(16 * N).reshape(N, 16) % 2)
    mixed = Shown("mixes", "", [Stage("block 1", 7, None)], np.zeros(N, int))
    found = texts(pictures(Shown("merges", "", [merged], np.zeros(N, int)), mixed))
    assert "block 1: 7 of 16, mixed" in found and any("share a token" in text for text in found)


@pytest.mark.parametrize("names", ["0", "a class of an unusually long name on something_without_any_blanks_in_it"])
def test_no_text_is_on_another_or_on_a_picture_or_outside(names: str) -> None:
    sheet = figure(pictures(names=names))
    canvas: Any = sheet.canvas
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in sheet.texts]
    boxes += [axis.get_window_extent(canvas.get_renderer()) for axis in sheet.axes]
    for i, one in enumerate(boxes):
        assert sheet.bbox.x0 <= one.x0 and one.x1 <= sheet.bbox.x1
        assert sheet.bbox.y0 <= one.y0 and one.y1 <= sheet.bbox.y1
        for other in boxes[i + 1 :]:
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            down = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert across <= 1 or down <= 1
