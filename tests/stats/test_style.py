"""The style sheet of plots: lines that can be told apart, and texts that fit their figures."""

from itertools import pairwise

import pytest

from sparsebench.stats import style


def test_lines_differ_in_colour_or_dash_and_similar_colours_in_dash() -> None:
    lines = [style.series(place) for place in range(24)]
    assert len({(line.color, str(line.linestyle)) for line in lines}) == 24
    assert {line.marker for line in lines[:6]} == {line.marker for line in lines[18:]} == set(style.MARKERS)
    assert [line.color for line in lines[:6]] == [line.color for line in lines[6:12]] == list(style.COLOURS)
    blue, orange, green, vermilion, sky, purple = (line.linestyle for line in lines[:6])
    assert blue != sky and orange != vermilion and green != purple


@pytest.mark.parametrize("most", [10_000, 300, 1])
def test_a_text_is_wrapped_between_words_and_never_inside_a_formula(most: float) -> None:
    words = ["accuracy", "of", "dense", "at", "$a + b$", "and", "no", "x" * 50]
    text = style.new(3, 2).text(0, 0, " ".join(words))

    def width(line: str) -> float:
        text.set_text(line)
        return float(text.get_window_extent().width)

    style.wrap(text, most)
    lines = text.get_text().split("\n")
    assert "".join("".join(lines).split()) == "".join("".join(words).split())
    assert any("$a + b$" in line for line in lines) and (len(lines) == 1) == (most == 10_000)
    assert all(width(line) <= most or " " not in line.replace("$a + b$", "") for line in lines)
    assert all(width(f"{line} {rest.split()[0]}") > most for line, rest in pairwise(lines) if "$" not in rest)
