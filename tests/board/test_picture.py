"""Pictures of boards: named lines, omitted strategies, and legible labels."""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from published_boards import write_part

from sparsebench.board import picture
from sparsebench.board.over_budgets import Curves
from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.stats import paired, style

BUDGETS = (0.8, 0.6, 0.4)
TITLE = "Digits on photographs, ten classes. 24 networks. Tested as they are."


def board(
    losses: dict[str, Sequence[float]], spent: dict[str, float] | None = None, last: int = 0
) -> tuple[pd.DataFrame, Curves]:
    """Return rows and curves of strategies with these losses in points; the first `last` share their ranks."""
    kinds = {"oracle": "oracle", "random": "baseline", "random_inside": "baseline"}

    def point(name: str, asked: float, macs: float, less: float) -> dict[str, Any]:
        return {"curve": name, "strategy": name, "asked": asked, "macs_ratio": macs, "accuracy": 0.9 - less / 100,
                "accuracy_delta": -less / 100, "accuracy_delta_low": -less / 100 - 0.001,
                "accuracy_delta_high": -less / 100 + 0.001}  # fmt: skip

    points_of = [point("dense", 1.0, 1.0, 0.0)]
    rows = [{"strategy": "dense", "kind": "baseline", "accuracy": 0.9}]
    for place, (name, points) in enumerate(losses.items(), 1):
        low, high = (1, last) if place <= last else (place, place)
        ranks = {} if name == "oracle" else {"rank_low": low, "rank_high": high}
        rows.append({"strategy": name, "kind": kinds.get(name, "deployable"), **ranks})
        times = (spent or {}).get(name, 1.0)
        points_of += [point(name, b, b * times, less) for b, less in zip(BUDGETS, points, strict=False)]
    table = pd.DataFrame(rows).set_index("strategy", drop=False)
    return pd.DataFrame(points_of), Curves(BUDGETS, 0.6, table, paired.compare([]))


REFERENCES = {"random_inside": (2, 5, 10), "random": (5, 9, 20), "oracle": (-0.2, -0.4, -0.6)}
ALIKE = {f"strategy_{i:02}": (0.1, 0.2, 1 + i / 1000) for i in range(12)}


def boxes(figure: Figure) -> dict[str, tuple[float, float, float, float]]:
    """Return the boxes of a figure's visible texts, in pixels."""
    with style.sheet():
        figure.draw_without_rendering()
    beyond = {
        tick.label1
        for axes in figure.axes
        for tick in axes.xaxis.get_major_ticks()
        if not min(axes.get_xlim()) <= tick.get_loc() <= max(axes.get_xlim())
    }
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and text not in beyond]
    return {text.get_text(): text.get_window_extent().extents for text in texts}


def lines(figure: Figure) -> dict[str, tuple[str, str]]:
    """Return colour and dashes of the named lines."""
    named = [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (to_hex(line.get_color()), str(line._dash_pattern)) for line in named}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "more"), [("one", REFERENCES), ("two", REFERENCES), ("two", {})])
def test_labels_of_strategies_that_end_together_can_be_read(width: str, more: dict[str, Any]) -> None:
    figure = picture.curves(*board(ALIKE | more), TITLE, list(ALIKE), width)
    texts = boxes(figure)
    labels = {name: texts[name] for name in (*ALIKE, *more)}
    for (name, a), (other, b) in combinations(labels.items(), 2):
        assert a[3] <= b[1] or b[3] <= a[1], (name, other)
    area = figure.axes[0].get_window_extent().extents
    height = max(box[3] - box[1] for box in labels.values())
    assert all(box[0] > area[2] for box in labels.values())  # right of the axes
    assert all(area[1] - 2 * height < (box[1] + box[3]) / 2 < area[3] + 2 * height for box in labels.values())
    for text, (left, bottom, right, top) in texts.items():
        assert left >= 0 and bottom >= 0 and right <= figure.bbox.width and top <= figure.bbox.height, text
    assert figure.get_figwidth() == style.COLUMNS[width]
    order = sorted(ALIKE, key=lambda name: -labels[name][1])
    assert order == list(ALIKE)  # in the order of the ends of their lines
    # A line connects the end of each strategy's curve with its name, right of the axes.
    joints = [line for line in figure.axes[0].lines if not line.get_clip_on() and len(line.get_xdata()) > 1]
    to_pixels = figure.axes[0].transData.transform
    ends = {line.get_label(): line.get_xydata()[-1] for line in figure.axes[0].lines}
    joined = set()
    for joint in joints:
        points = to_pixels(joint.get_xydata())
        (name,) = (name for name, box in labels.items() if abs((box[1] + box[3]) / 2 - points[-1, 1]) < 1)
        assert np.allclose(points[0], to_pixels(ends[name]), atol=1) and points[0, 1] == pytest.approx(points[1, 1])
        assert area[2] < points[1, 0] < points[2, 0] < points[3, 0] < labels[name][0]
        joined.add(name)
    assert joined == set(labels)
    assert labels[order[0]][1] - labels[order[-1]][1] < 12.5 * height, "no farther apart than needed"
    assert figure.get_figheight() < 5


def test_named_lines_differ_in_colour_or_dash() -> None:
    many = {f"s{i}": (0.1, 0.2, i / 10) for i in range(24)}
    looks = lines(picture.curves(*board(many | REFERENCES), TITLE, list(many)))
    assert set(looks) == {*many, *REFERENCES} and len(set(looks.values())) == len(looks)
    with pytest.raises(UserError, match="at most"):
        picture.curves(*board(many | {"more": (1, 1, 1)}), TITLE, [*many, "more"])


def test_entries_of_one_strategy_are_named_by_the_parameters_in_which_they_differ() -> None:
    losses = {"m(a=1,b=(2,3))": (0.1, 0.2, 0.3), "m(a=4,b=(2,3))": (1, 2, 3), "n(a=1,b=2)": (2, 3, 4)}
    texts = boxes(picture.curves(*board(losses | REFERENCES), TITLE, list(losses)))
    assert {"m(a=1)", "m(a=4)", "n(a=1,b=2)"} <= set(texts) and not {*losses} & set(texts) - {"n(a=1,b=2)"}


def test_the_best_lines_are_named_and_others_are_grey() -> None:
    """The best at small budgets and of the best ranks are named and others are grey."""
    rest = {f"other_{i}": (0.5, 1, 3 + i / 10) for i in range(9)}
    losses = {"early": (0, 2, 9), "steady": (1, 1, 1), **rest, **REFERENCES, "worse": (9, 20, 40)}
    frame = board(losses, last=4)
    named = set(lines(picture.curves(*frame, TITLE)))
    assert {"early", "steady", *REFERENCES} < named and "worse" not in named
    assert len(named) == 6 + len(REFERENCES)
    grey = [line for line in picture.curves(*frame, TITLE).axes[0].lines if to_hex(line.get_color()) == style.PALE]
    assert len(grey) == len(losses) - len(named)


def test_a_line_begins_at_dense_with_a_bar_at_each_budget() -> None:
    """A line begins at dense and has a bar and a mark at each budget."""
    frame = board({"good": (0.1, 0.3, 1), "other": (0.2, 0.5, 3), **REFERENCES})
    axes = picture.curves(*frame, TITLE, ["good"]).axes[0]
    line, marks, *_ = (line for line in axes.lines if line.get_color() == style.series(0).color)
    points = np.array([(1, 0), (0.8, -0.1), (0.6, -0.3), (0.4, -1)])
    assert np.allclose(np.transpose(line.get_data()), points) and np.allclose(
        np.transpose(marks.get_data()), points[1:]
    )
    (bars,) = axes.collections
    assert np.allclose(np.array(bars.get_segments()), points[1:, None] + [[0, -0.1], [0, 0.1]])


def test_what_spends_more_than_a_budget_is_not_the_most_accurate_at_it() -> None:
    rest = {f"other_{i}": (0.5 + i / 10, 1 + i / 10, 3 + i / 10) for i in range(picture.NAMED_BY_DEFAULT)}
    frame = board({**rest, "over": (0.2, 0.3, 0.4), **REFERENCES}, {"over": 1.2}, last=picture.NAMED_BY_DEFAULT)
    assert "over" not in picture.main_strategies(*frame)
    assert "over" in picture.main_strategies(
        *board({**rest, "over": (0.2, 0.3, 0.4), **REFERENCES}, last=picture.NAMED_BY_DEFAULT)
    )
    rows, over = board({**rest, "over": (0.2, 0.3, 0.4), **REFERENCES}, last=picture.NAMED_BY_DEFAULT)
    keep_rates = pd.DataFrame([{"curve": None, "asked": math.nan, "macs_ratio": 0.5, "accuracy": 0.8}] * 2)
    assert picture.main_strategies(pd.concat([rows, keep_rates]), over) == picture.main_strategies(rows, over)


def test_what_costs_more_than_dense_is_in_no_axis() -> None:
    frame = board({"good": (0.1, 0.3, 1), "dear": (0, 0, 0), **REFERENCES}, {"dear": 64.0})
    figure = picture.curves(*frame, TITLE)
    first, last = figure.axes[0].get_xlim()
    assert first == 1 and 0.38 < last < 0.4 and not any("dear" in text for text in boxes(figure))
    with pytest.raises(UserError, match="more"):
        picture.curves(*frame, TITLE, ["dear"])


def test_the_axis_fits_what_is_named_and_not_the_worst() -> None:
    figure = picture.curves(*board({"good": (0.1, 0.3, 1), **REFERENCES, "collapsed": (50, 80, 80)}), TITLE)
    assert -30 < figure.axes[0].get_ylim()[0] < -20
    fair = {"good": (0.1, 0.2, 0.3), "random_inside": (0.2, 0.5, 1)}
    for loss, named in ((4, "random"), (4.8, "random (-5)"), (40, "random (-40)")):  # four times the loss of the others
        low = picture.curves(*board({**fair, "random": (0.5, 1, loss)}), TITLE)
        assert (low.axes[0].get_ylim()[0] < -4) == (named == "random") and named in boxes(low)
    for alone in ({"good": (0.05, 0.05, 0.05)}, {"random": (0.05, 0.05, 0.05)}):
        assert picture.curves(*board(alone), TITLE).axes[0].get_ylim() == pytest.approx((-0.53, 0.23), abs=0.01)


def test_names_of_strangers_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = [r"$\frac{a}{", "two\nlines", "<script>alert(1)</script>", "\x1b[31mred", "名前", "x" * 300, "ok_{}"]
    frame = board({name: (0.1, 0.3, 1 + i) for i, name in enumerate(names)})
    figure = picture.curves(*frame, "a $ and a $ and\nmore", names)
    for form in style.FORMS:
        content = style.content(figure, form)
        if form == "svg":
            ElementTree.fromstring(content)
    drawn = [text for text in boxes(figure) if "$" in text]
    assert any(text.startswith(r"$\frac{a}{") for text in drawn)
    assert max(map(len, (text for text in boxes(figure) if text.startswith("xx")))) == 34
    assert all(box[2] <= figure.bbox.width for box in boxes(figure).values())


VALUES = pd.DataFrame(
    [
        ("dense", "baseline", 1.0, 60.0, 50.0, 70.0),
        ("slow", "deployable", 0.5, 120.0, 100.0, math.inf),
        ("fast", "deployable", 0.5, 10.0, 8.0, 12.0),
        ("never", "baseline", 0.5, math.inf, 200.0, math.inf),
        ("unmeasured", "deployable", 0.5, math.nan, math.nan, math.nan),
        ("dear", "deployable", 60.0, 1.0, 1.0, 1.0),
        ("oracle", "oracle", 0.5, 5.0, math.nan, math.nan),
    ],
    columns=["strategy", "kind", "macs_ratio", "value", "low", "high"],
).assign(label=lambda frame: frame["strategy"])


@pytest.mark.parametrize("width", list(style.COLUMNS))
def test_dots_are_of_what_was_measured_the_best_on_top(width: str) -> None:
    figure = picture.dots(VALUES, TITLE, "training samples", width=width, samples=True)
    texts = boxes(figure)
    rows = {text.get_text(): -text.get_window_extent().y0 for text in figure.axes[0].get_yticklabels()}
    assert sorted(rows, key=lambda name: rows[name]) == ["oracle", "fast", "dense", "slow", "never"]
    assert not {"unmeasured", "dear"} & set(texts) and any("not reached" in text for text in texts)
    assert all(box[2] <= figure.bbox.width and box[1] >= 0 for box in texts.values())
    places = {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines}
    assert places["strategy"] == [(10, 1), (120, 3)] and places["dense"] == [(60, 2)]
    assert {"strategy", "dense", "oracle (knows the relevant tokens)"} <= set(texts)  # its legend can be read
    heights = np.array([text.get_window_extent().height for text in figure.axes[0].get_yticklabels()])
    apart = np.diff(sorted(rows.values()))
    assert (heights.max() < apart).all() and (apart < 2.5 * heights.max()).all()
    only = boxes(picture.dots(VALUES, TITLE, "training samples", ["fast"], width))
    assert {"fast", "dense"} <= set(only) and "slow" not in only
    with pytest.raises(UserError, match="unmeasured"):
        picture.dots(VALUES, TITLE, "training samples", ["unmeasured"], width)


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["leaderboard", *map(str, words)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records of a few strategies; do not write to it."""
    some = ("dense", "tome", "noise", "attn_topk", "random_inside", "oracle")
    return write_part(tmp_path_factory.mktemp("few"), some)


def test_leaderboard_draws_a_picture_by_the_ending_of_the_file(few: Path, tmp_path: Path) -> None:
    gaps = write_part(tmp_path / "gaps", ("dense", "tome", "random_inside", "oracle"), ["spurious"])
    for folder, name, *words in (
        (few, "board.svg", "--strategies", "tome, noise"),
        (gaps, "gap.pdf", "--of", "gap", "--width", "one"),
    ):
        code, output = call(folder, "--picture", tmp_path / name, *words)
        assert code == 0 and "written" in output
    texts, gap = (tmp_path / "board.svg").read_text(encoding="utf-8"), (tmp_path / "gap.pdf").read_bytes()
    assert "<!-- tome -->" in texts and "<!-- noise -->" in texts and "<!-- attn_topk -->" not in texts
    assert "depth 5" in texts and "nan" not in texts.lower().replace("dominant-", "")
    assert gap.startswith(b"%PDF") and b"/MediaBox [ 0 0 234 " in gap


def test_one_column_has_no_header_and_a_title_replaces_it(few: Path, tmp_path: Path) -> None:
    """The caption of a paper describes data and networks, so a picture of one column does not."""
    for name, *words in (("one", "--width", "one"), ("mine", "--title", "Some <b>title</b>"), ("none", "--title", "")):
        code, output = call(few, "--picture", tmp_path / f"{name}.svg", *words)
        assert code == 0, output
    texts = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    assert not any("depth 5" in text for text in texts.values())
    assert "Some &lt;b&gt;title" in texts["mine"] and "Some" not in texts["none"]


def test_a_page_has_a_title_and_a_link(few: Path, tmp_path: Path) -> None:
    file, link = tmp_path / "page.html", "https://paper.example/a_b?c=d"
    code, output = call(few, "--format", "html", "-o", file, "--title", "<i>Mine</i>", "--link", link)
    page = file.read_text(encoding="utf-8")
    assert code == 0, output
    assert "&lt;i&gt;Mine&lt;/i&gt;</h1>" in page and "<i>Mine" not in page and f'href="{link}"' in page
    for address in ("javascript:alert(1)", 'https://a.example/"x', "ftp://a.example"):
        code, output = call(few, "--format", "html", "-o", tmp_path / "no.html", "--link", address)
        assert code == 2 and "--link" in output and not (tmp_path / "no.html").exists()


def test_a_page_that_knows_its_address_has_a_picture_for_previews(few: Path, tmp_path: Path) -> None:
    file, url = tmp_path / "my board.html", "https://boards.example/of/us/"
    code, output = call(few, "--format", "html", "-o", file, "--url", url)
    page = file.read_text(encoding="utf-8")
    assert code == 0, output
    assert f'<meta property="og:url" content="{url}">' in page
    assert f'<meta property="og:image" content="{url}my%20board.png">' in page
    assert (tmp_path / "my board.png").read_bytes().startswith(b"\x89PNG")
    for address in ("javascript:alert(1)", "/of/us", 'https://a.example/"x'):
        code, output = call(few, "--format", "html", "-o", tmp_path / "no.html", "--url", address)
        assert code == 2 and "--url" in output and not list(tmp_path.glob("no.*"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--title", "x"], "--picture"),
        (["--link", "https://a.example"], "html"),
        (["--url", "https://a.example"], "html"),
        (["--url", "https://a.example", "--format", "html"], "-o FILE.html"),
        (["--picture", "board.jpg"], "board.jpg"),
        (["--picture", "board.png", "--strategies", "tomee"], "did you mean 'tome'"),
        (["--width", "one"], "--picture"),
        (["--of", "gap"], "--picture"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_the_users_mistake(few: Path, words: list[str], named: str) -> None:
    code, output = call(few, *words)
    assert code == 2 and named in output and "Traceback" not in output and not Path("board.png").exists()


def test_a_board_without_results_says_so_in_place_of_an_empty_chart() -> None:
    figure = picture.dots(VALUES[:0], TITLE, "accuracy, %")
    assert any("No strategy has a result" in text for text in boxes(figure))
    assert not any(axis.axison for axis in figure.axes)
    assert style.content(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("samples", [False, True])
def test_a_picture_of_thousands_of_rows_has_the_best(samples: bool) -> None:
    """A picture of thousands of rows has the best and dense and says so."""
    names = [f"mine(power={k})" for k in range(2500)] + ["dense"]
    values = pd.DataFrame({"strategy": names, "label": names, "kind": "deployable", "macs_ratio": 0.5})
    values["value"] = np.arange(2501.0) + 1 if samples else 2500 - np.arange(2501.0)
    values["low"] = values["high"] = values["value"]
    figure = picture.dots(values, TITLE, "accuracy, %", samples=samples)
    texts = boxes(figure)
    assert {"mine(power=0)", "mine(power=9)", "dense"} <= texts.keys() and "mine(power=2499)" not in texts
    assert figure.bbox.height < 6000 and any("of 2,501 rows" in " ".join(text.split()) for text in texts)
    assert len(style.content(figure)) > 0
