"""The page, opened from a file in a real browser (see `opened`), or read as bytes."""

import base64
import csv
import hashlib
import html
import io
import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_boards import HOSTILE, board_of, over_budgets, row, single

from sparsebench.board.board import Board
from sparsebench.board.columns import BY_KEY
from sparsebench.board.judge import Leaderboard
from sparsebench.board.published import page as render

pytestmark = pytest.mark.integration

Open = Callable[..., Any]
NARROW: dict[str, Any] = {"viewport": {"width": 390, "height": 844}}
DARK = {"color_scheme": "dark"}
SIZES = [pytest.param({}, id="wide"), pytest.param(NARROW, id="narrow", marks=pytest.mark.slow)]
SERIOUS = ("serious", "critical")
EMPTY = Board(Leaderboard(), Leaderboard(), ["mine on theory: 3 cells failed: it broke"])


class Seen(HTMLParser):
    """The elements of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag in self.texts and attributes.get("type") != "application/json":
            self.texts[tag].append(data)


def strategies(page: Any) -> list[str]:
    return page.locator("#table tbody th.strategy").all_inner_texts()


def header(page: Any, key: str) -> Any:
    return page.locator(f'#table thead [data-sort="{key}"]')


def until(page: Any, holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; the page's policy forbids waiting inside the page."""
    for _ in range(500):
        if holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it has not come to hold in ten seconds")


def choose(page: Any, *names: str) -> None:
    for name in names:
        page.locator("#names").get_by_label(name, exact=True).click()


def named(page: Any) -> list[str]:
    """Return the strategies that the chart names, without references."""
    names = page.locator("#plot text.name").all_text_contents()
    return [name for name in names if name not in ("oracle", "random_inside") and not name.startswith("random")]


def overlapping(boxes: list[dict[str, float]]) -> bool:
    boxes = sorted(boxes, key=lambda box: box["y"])
    return any(upper["y"] + 0.8 * upper["height"] > lower["y"] for upper, lower in itertools.pairwise(boxes))


def test_the_first_screen_has_the_data_and_the_best(opened: Open) -> None:
    """The first screen says what was measured and what is best at each budget."""
    page = opened(over_budgets(), viewport={"width": 1280, "height": 800})
    best = page.locator("#best tbody tr")
    assert best.count() == 4 and "mine_0" in best.last.inner_text() and "+42.0" in best.last.inner_text()
    box = best.last.bounding_box()
    assert page.get_by_text("task composite").is_visible() and box["y"] + box["height"] < 800


def test_the_best_and_the_references_are_named(opened: Open) -> None:
    """The best and the references are named and what costs more than dense is apart."""
    page = opened(over_budgets())
    assert 5 <= len(named(page)) <= 8 and {"oracle", "random_inside"} < set(
        page.locator("#plot text.name").all_text_contents()
    )
    assert page.locator("#plot path.other").count() == 30 - len(named(page))
    assert "dear" in page.locator("#costly").inner_text() and page.locator("#names").get_by_label("dear").count() == 0
    assert strategies(page)[-1] == "dear" and strategies(page)[-2] == "oracle"
    assert page.locator("#table tr.divider").count() == 2


@pytest.mark.parametrize("options", SIZES)
def test_no_two_lines_look_alike_and_no_label_lies_on_another(opened: Open, options: dict[str, Any]) -> None:
    page = opened(over_budgets(), "#" + "&".join(f"on=mine_{k}" for k in range(23)), **options)
    page.locator("#chosen").click()
    choose(page, *(f"mine_{k}" for k in range(23, 26)))
    assert len(named(page)) == 24  # the most that can be distinguished
    looks = [
        (one.get_attribute("class"), one.get_attribute("stroke-dasharray"))
        for one in page.locator("#plot path.line").all()
    ]
    assert len(set(looks)) == len(looks) == 24 + 3
    boxes, picture = [box.bounding_box() for box in page.locator("#plot text.name").all()], page.locator("#plot svg")
    edges = picture.bounding_box()
    assert not overlapping(boxes) and all(edges["y"] <= box["y"] for box in boxes)
    assert all(box["y"] + box["height"] <= edges["y"] + edges["height"] for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_choice_of_strategies_stands_in_the_address(opened: Open) -> None:
    page = opened(over_budgets())
    before = named(page)
    page.locator("#chosen").click()
    page.locator("#names").get_by_label("mine_20", exact=True).focus()
    page.keyboard.press("Space")
    assert set(named(page)) == {*before, "mine_20"}
    assert page.evaluate("document.activeElement.dataset.name") == "mine_20"
    assert set(named(opened(over_budgets(), "#" + page.url.split("#")[1]))) == {*before, "mine_20"}
    choose(page, *before)
    assert named(page) == ["mine_20"]


def test_hover_shows_numbers_with_intervals_and_a_click_names_the_line(opened: Open) -> None:
    page = opened(over_budgets("one", "two"), "#on=two")
    mark = page.locator("#plot g path.mark").last.bounding_box()
    page.mouse.move(mark["x"] + 3, mark["y"] + 3)
    tip = page.locator("#tip").inner_text()
    assert tip.startswith("two") and "[" in tip and BY_KEY["random_delta"].heading in tip
    page.mouse.click(mark["x"] + 3, mark["y"] + 3)
    assert named(page) == []
    page.mouse.click(mark["x"] + 3, mark["y"] + 3)
    assert named(page) == ["two"]


def test_the_axis_can_be_gmacs_or_speed_where_they_are_known(opened: Open) -> None:
    page = opened(over_budgets("one", "two"))
    for axis, most in (("macs_ratio", "1"), ("gmacs", "2")):
        page.locator("#axis").select_option(axis)
        assert set(named(page)) == {"one", "two"} and most in page.locator("#plot text").all_text_contents()
    page.locator("#axis").select_option("speed_up")
    assert named(page) == ["one"] and "two" in page.locator("#costly").inner_text()
    assert not opened(single()).locator("#axis").is_visible()


def test_the_table_is_sorted_by_accuracy_at_the_chosen_budget(opened: Open) -> None:
    page = opened(over_budgets("one", "two"))
    assert strategies(page) == ["dense", "one", "two", "random_inside", "random", "oracle", "dear"]
    assert page.locator("#table [aria-sort=descending]").inner_text().startswith("accuracy")
    cells = page.locator("#table tr:has(th:text-is('two')) td.accuracy")
    before = cells.inner_text()
    page.locator("#budget").select_option("0.3")
    assert cells.count() == 1 and cells.inner_text() != before
    again = opened(over_budgets("one", "two"), "#" + page.url.split("#")[1])
    assert again.locator("#table").inner_text() == page.locator("#table").inner_text()


def test_headings_sort_and_turn_around(opened: Open) -> None:
    page = opened(single())
    assert strategies(page) == ["dense", "mine", "random", "oracle", "dear"]
    header(page, "accuracy").click()
    assert strategies(page) == ["random", "mine", "dense", "oracle", "dear"]
    assert header(page, "accuracy").locator("..").get_attribute("aria-sort") == "ascending"
    header(page, "strategy").focus()
    page.keyboard.press("Enter")
    assert strategies(page)[:3] == ["dense", "mine", "random"]
    assert page.evaluate("document.activeElement.dataset.sort") == "strategy"
    page = opened(over_budgets("one", "two"))
    header(page, "speed_up").click()
    fastest, dense, unmeasured = map(strategies(page).index, ("one", "dense", "two"))
    assert fastest < dense < unmeasured


def test_not_reached_is_larger_than_any_number_and_nothing_is_last(opened: Open) -> None:
    page = opened(single(), "#task=1")
    assert strategies(page) == ["mine", "dense", "random", "noise"]
    header(page, "sample_complexity").click()
    assert strategies(page) == ["random", "dense", "mine", "noise"]
    assert page.locator("[data-dots=sample_complexity] tbody th").all_inner_texts() == ["mine", "dense", "random"]
    assert "Not measured: noise" in page.locator("[data-dots=sample_complexity]").inner_text()
    assert not page.locator("[data-dots=aligned_gap_reduction]").is_visible()


def test_the_filter_leaves_rows_with_all_its_words(opened: Open) -> None:
    page = opened(single())
    page.get_by_label("Filter").fill("RAND deployable")
    assert strategies(page) == []
    page.get_by_label("Filter").fill("RAND baseline")
    assert strategies(page) == ["random"] and page.locator("#count").inner_text() == "1 row"
    page.get_by_label("Filter").fill("nowhere")
    assert "No row" in page.locator("#table tbody").inner_text()


def test_tasks_are_chosen_and_a_board_of_one_budget_has_dots(opened: Open) -> None:
    page = opened(single())
    assert page.locator("#plot .mark").count() == 4
    page.get_by_label("Task").select_option(index=1)
    assert "noise" in strategies(page) and not page.locator("#budget").is_visible()


def copy(page: Any, form: str) -> str:
    """Copy the table in a form, and return what the clipboard then has."""
    page.get_by_role("button", name=form).click()
    until(page, lambda: page.locator("#copied").inner_text() == f"Copied as {form}.")
    return page.evaluate("navigator.clipboard.readText()")


def test_what_the_table_shows_is_copied(opened: Open) -> None:
    board = single()
    board.by_task.rankings[0].every.loc[2, "strategy"] = 'a|b,"c"\nd'
    page = opened(board, "#q=a%7Cb")

    lines = copy(page, "Markdown").splitlines()
    assert len(lines) == 3 and 'a\\|b,"c" d' in lines[2] and "40.0 [39.0, 41.0]" in lines[2]
    (copied,) = csv.DictReader(io.StringIO(copy(page, "CSV")))
    assert copied["strategy"] == 'a|b,"c"\nd' and copied["accuracy, %"] == "40.0 [39.0, 41.0]"
    page.get_by_text("BibTeX of sparsebench").click()
    page.get_by_role("button", name="Copy", exact=True).click()
    until(page, lambda: page.locator("#copied").inner_text() == "Copied as BibTeX.")
    assert page.evaluate("navigator.clipboard.readText()") == board.bibtex[0]


SIGNS = "![a](https://b.example/c.png) **d** _e_ &lt;f&gt; <https://g.example>|h;=1+1 -2+3 www.i.example"
"""Signs of Markdown, and a formula for spreadsheets that divide cells at semicolons."""


def test_hostile_texts_are_copied_as_texts(opened: Open) -> None:
    board = single()
    board.by_task.rankings[0].every.loc[2, "strategy"] = SIGNS
    board.by_task.rankings[0].every.loc[2, "checks"] = "+1+1"
    page = opened(board, "#q=c.png")

    text = copy(page, "CSV")
    for divider in ",;":
        cells = [cell for line in csv.reader(io.StringIO(text), delimiter=divider) for cell in line]
        assert not any(cell.lstrip().startswith(("=", "+1+1")) for cell in cells)

    reader = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    shown = reader.render(copy(page, "Markdown"))
    assert f"<td>{html.escape(SIGNS)}</td>" in re.sub(' style="[^"]*"', "", shown)


def test_of_a_long_table_the_first_rows_are_made_until_all_are_asked_for(opened: Open) -> None:
    page = opened(board_of([row(f"s{k}", k / 1000) for k in range(1000)]))
    assert strategies(page)[0] == "s999" and len(strategies(page)) < 1000
    page.get_by_label("Filter").fill("s99")
    assert len(strategies(page)) == 11
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name="Show all").click()
    assert len(strategies(page)) == 1000 and strategies(page)[-1] == "s0"


def test_the_head_of_the_table_stays_in_sight(opened: Open) -> None:
    page = opened(over_budgets())
    page.set_viewport_size({"width": 1280, "height": 320})
    page.locator("#table tbody tr").last.scroll_into_view_if_needed()
    head = page.locator("#table thead")
    assert page.locator("#table").bounding_box()["y"] < -100, "the table is scrolled"
    assert 0 <= header(page, "accuracy").bounding_box()["y"] < 60 and head.is_visible()


def test_everything_is_reached_with_the_keyboard_and_has_an_outline(opened: Open) -> None:
    page = opened(over_budgets("one", "two"))
    page.locator("#chosen").click()
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("(e => e.id || e.dataset.name || e.dataset.sort || e.textContent)(document.activeElement)")
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body"), reached[-1]
    assert {"budget", "search", "every", "two", "accuracy", "scroll", "CSV"} <= set(reached)


def several() -> Board:
    return over_budgets(*"abcdef")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (several, {}),
        pytest.param(several, DARK, marks=pytest.mark.slow),
        (single, NARROW | DARK),
    ],
)
def test_axe_finds_nothing_serious(opened: Open, make: Callable[[], Board], options: dict[str, Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install 'sparsebench[test]'")
    page = opened(make(), "#every=", **options)
    for summary in page.locator("summary:visible").all():
        summary.click()
    violations = axe.Axe().run(page).response["violations"]
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in violations if v["impact"] in SERIOUS] == []


@pytest.mark.parametrize("options", SIZES)
def test_hostile_texts_are_texts_and_leave_the_page_as_wide_as_it_is(opened: Open, options: dict[str, Any]) -> None:
    rows = [row(name, 0.9 - k / 20, budget=name, checks=name) for k, name in enumerate(HOSTILE)]
    about = {"notes": HOSTILE, "suites": HOSTILE, "bibtex": HOSTILE, "environments": {"a": {x: x for x in HOSTILE}}}
    page = opened(board_of(rows, **about), title="W" * 300, **options)
    assert [name[:5].strip() for name in strategies(page)] == [name[:5].strip() for name in HOSTILE]
    assert page.locator("main script, main img[onerror], main a").count() == 0
    curves = opened(over_budgets(*HOSTILE), **options)
    curves.locator("#chosen").click()
    assert curves.locator("#names input").count() == len(HOSTILE) + 3
    for view in (page, curves):
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_board_without_rows_says_so(opened: Open) -> None:
    page = opened(EMPTY)
    assert "No row" in page.locator("#table").inner_text() and not page.locator("#chart").is_visible()
    page.get_by_text("Technical notes").click()
    assert page.get_by_text("it broke").is_visible()


def test_without_scripts_the_first_screen_and_the_notes_are_there(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(render(over_budgets()))
    page = (context := chromium.new_context(java_script_enabled=False)).new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("#best tbody tr").count() == 4 and not page.get_by_role("button").all()
    context.close()


def test_hostile_texts_add_no_element_and_the_data_end_where_they_end() -> None:
    names = [*HOSTILE, "\ud800"]  # records cannot have the last one, but other files can
    plain, hostile = (
        render(
            board_of(
                [row(name, 0.5, budget=name) for name in texts[:-1]], notes=texts, papers={x: (x, x) for x in texts}
            )
        ).decode()
        for texts in (["a"] * len(names), names)
    )
    assert [tag for tag, _ in Seen(hostile).tags] == [tag for tag, _ in Seen(plain).tags]
    assert not any(name.startswith("on") for _, attributes in Seen(hostile).tags for name in attributes)
    assert not set("<>&\u2028\u2029") & set(hostile.split('id="data">')[1].split("</script>")[0])


def test_the_policy_allows_what_is_inlined_and_the_page_asks_nobody() -> None:
    seen = Seen(render(single()).decode())
    policy = next(a["content"] or "" for _, a in seen.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag, texts in seen.texts.items():
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts}
        assert set(rules.pop(f"{tag}-src").split()) == hashes
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    asking = {"src", "href", "srcset", "action", "data", "poster", "background", "ping", "style"}
    named = [attributes[name] or "" for _, attributes in seen.tags for name in asking & set(attributes)]
    assert named and all(url.startswith(("data:image/png;base64,", "#")) for url in named)
    assert not re.search(
        r"@import|\beval\(|fetch\(|XMLHttpRequest", "".join(seen.texts["script"] + seen.texts["style"])
    )


VARIANTS = [f"method_of_mine(threshold={x},temperature=0.5,rounds=12,warmup=3,strict=False)" for x in (0.25, 0.5, 0.75)]


@pytest.mark.parametrize("sandbox", ["", 'sandbox="allow-scripts"'])
def test_controls_work_in_a_notebook_frame(chromium: Any, tmp_path: Path, sandbox: str) -> None:
    """In a frame of a notebook every control works and the notebook stays."""
    source = html.escape(render(over_budgets("one", "two")).decode())
    frame = f'<h1>a notebook</h1><iframe {sandbox} width="1200" height="900" srcdoc="{source}"></iframe>'
    (tmp_path / "notebook.html").write_text(frame, encoding="utf-8")
    page, errors = chromium.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "notebook.html").as_uri())
    inner = page.frame_locator("iframe")
    inner.locator("html[data-ready]").wait_for()
    cell = inner.locator("#table tr:has(th:text-is('two')) td.accuracy")
    before = cell.inner_text()
    inner.locator("#budget").select_option("0.3")
    assert cell.inner_text() != before
    inner.get_by_label("Filter").fill("two")
    assert inner.locator("#table tbody th.strategy").all_inner_texts() == ["two"]
    inner.locator("#chosen").click()
    inner.locator("#names").get_by_label("one", exact=True).click()
    assert "one" not in inner.locator("#plot text.name").all_text_contents()
    inner.get_by_text("Skip to the table").focus()
    page.keyboard.press("Enter")
    assert inner.locator(":focus").get_attribute("id") == "scroll" and inner.locator("#chart").is_visible()
    assert page.locator("h1").all_inner_texts() == ["a notebook"] and not errors
    page.close()


def test_where_a_policy_forbids_the_scripts_the_page_says_so(chromium: Any, opened: Open, tmp_path: Path) -> None:
    policy = "script-src 'self'; style-src 'self'"  # as the header of a site
    content = render(over_budgets()).decode()
    (tmp_path / "page.html").write_text(
        content.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">'), "utf-8"
    )
    page = chromium.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    said = page.locator("#best + p")
    assert said.is_visible() and "script" in said.inner_text()
    page.close()
    assert said_in(opened(over_budgets()), "did not run") == 0


def test_in_a_frame_without_scripts_the_page_says_so(chromium: Any, tmp_path: Path) -> None:
    source = html.escape(render(over_budgets()).decode())
    (tmp_path / "site.html").write_text(
        f'<iframe sandbox width="900" height="800" srcdoc="{source}"></iframe>', "utf-8"
    )
    page = chromium.new_page()
    page.goto((tmp_path / "site.html").as_uri())
    inner = page.frame_locator("iframe")
    said = inner.locator("#best + p")
    said.wait_for()
    assert "script" in said.inner_text() and inner.locator("#best tbody tr").count() == 4
    page.close()


def said_in(page: Any, words: str) -> int:
    """Return how many visible paragraphs of a page contain the words."""
    return sum(words in text for text in page.locator("p:visible").all_inner_texts())


def test_sentences_are_about_what_the_page_shows(opened: Open) -> None:
    one, several_budgets = opened(single()), opened(over_budgets("one", "two"))
    assert said_in(one, "over all budgets") == 0 and said_in(several_budgets, "over all budgets") == 1
    terms = one.locator("li strong").all_inner_texts()
    assert "MACs / dense" in terms and "oracle" in terms
    assert not {"Kept accuracy", "Reduction", "AUROC", "Speed-up", "vs random at its site"} & set(terms)
    assert "Kept accuracy" in several_budgets.locator("li strong").all_inner_texts()
    legend = several_budgets.locator("#legend")
    assert "Grey" not in legend.inner_text() and "most accurate" in legend.inner_text()
    several_budgets.locator("#chosen").click()
    choose(several_budgets, "one")
    assert "Grey" in legend.inner_text() and "most accurate" not in legend.inner_text()


def test_a_third_party_strategy_has_a_name_and_a_colour_however_bad_it_is(opened: Open) -> None:
    board = over_budgets()
    named_before = named(opened(board))
    assert "mine_29" not in named_before
    assert set(named(opened(board._replace(third_party=frozenset({"mine_29"}))))) == {*named_before, "mine_29"}


@pytest.mark.parametrize("options", [{}, NARROW], ids=["wide", "narrow"])
def test_variants_with_long_names_are_told_apart(opened: Open, options: dict[str, Any]) -> None:
    page = opened(over_budgets(*VARIANTS), **options)
    for place in ("#plot text.name", "#names label", "#table tbody th.strategy"):
        texts = page.locator(place).all_text_contents()
        assert len(set(texts)) == len(texts) and sum(text.strip().startswith("method") for text in texts) == 3, place
    assert all(len(text) < 30 for text in page.locator("#plot text.name").all_text_contents())


def test_a_copied_rank_is_no_date_for_a_spreadsheet(opened: Open) -> None:
    page = opened(single())
    page.get_by_role("button", name="CSV").click()
    until(page, lambda: page.locator("#copied").inner_text() == "Copied as CSV.")
    rows = list(csv.reader(io.StringIO(page.evaluate("navigator.clipboard.readText()"))))
    ranks = {row[1]: row[0] for row in rows}
    assert ranks["mine"] == "1" and ranks["oracle"] == "-" and not re.search(r"\d-\d", ranks["dense"])
    assert re.findall(r"\d+", ranks["dense"]) == ["1", "2"]


def test_the_accuracy_is_visible_on_a_narrow_screen(opened: Open) -> None:
    """On a narrow screen the accuracy is in sight and a table says that it is cut."""
    page = opened(over_budgets("one", "two"), **NARROW)
    box = page.locator("#table tr:has(th:text-is('one')) td.accuracy").bounding_box()
    assert box["x"] + box["width"] <= 390
    hint = page.locator("p:visible + #scroll")
    assert hint.count() == 1
    # The names stay in sight when the table is scrolled.
    page.locator("#scroll").evaluate("e => e.scrollLeft = 150")
    assert 0 <= page.locator("#table th:text-is('one')").bounding_box()["x"] < 40


def test_a_wide_table_says_that_it_is_cut_and_a_narrow_one_does_not(opened: Open) -> None:
    page = opened(over_budgets("one", "two"))
    assert page.locator("p:visible + #scroll").count() == 0
    page.get_by_label("all columns").check()
    assert page.locator("p:visible + #scroll").count() == 1


def test_with_an_address_of_the_documentation_the_page_links_to_it() -> None:
    links = [a["href"] for tag, a in Seen(render(single(), "../..").decode()).tags if tag == "a"]
    assert "../../understand/judging.html" in links


def test_points_of_the_chart_are_reached_with_the_keyboard_and_have_their_values_as_names(opened: Open) -> None:
    page = opened(over_budgets("one", "two"), "#on=one&on=two")
    stops = page.locator("#plot [role=button]")
    assert page.locator("#plot [tabindex='0']").count() == 1
    page.locator("#axis").focus()
    page.keyboard.press("Tab")
    seen: set[str] = set()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowDown", "ArrowRight"):
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        seen.add(label)
        tip = page.locator("#tip").inner_text()
        assert label.split(",")[0] == tip.split("\n")[0] and re.search(r"accuracy[^;]*\d", label)
        page.keyboard.press(key)
    assert len(seen) == 7 <= stops.count() and {"one", "two"} <= {label.split(",")[0] for label in seen}
    while not (label := page.evaluate("document.activeElement.getAttribute('aria-label')")).startswith("two,"):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert named(page) == ["one"]
    assert page.evaluate("document.activeElement.getAttribute('role')") == "button"  # the focus stays in the chart


def test_tables_have_captions_and_heads_of_rows_and_columns(opened: Open) -> None:
    for page in (opened(over_budgets("one", "two")), opened(single())):
        tables = page.locator("table").all()
        assert tables
        for table in tables:
            assert table.locator("caption").inner_text().strip()
            assert table.locator("thead th").count() == table.locator("thead th[scope=col]").count() > 0
            for line in table.locator("tbody tr").all():
                assert line.locator("th[scope]").count() == 1


def test_a_preview_of_the_page_has_its_title_and_the_best() -> None:
    tags = Seen(render(over_budgets(HOSTILE[0], "two"), title='a "title" <b>').decode()).tags
    said = {a["property"]: a["content"] or "" for tag, a in tags if tag == "meta" and "property" in a}
    assert said["og:title"] == 'a "title" <b>' and HOSTILE[0] in said["og:description"]
    assert "%" in said["og:description"] and not any(tag == "b" for tag, _ in tags)


def test_without_several_budgets_the_accuracy_is_visible_on_a_narrow_screen_too(opened: Open) -> None:
    page = opened(single(), **NARROW)
    box = page.locator("#table tr:has(th:text-is('mine')) td.accuracy").bounding_box()
    assert box["x"] + box["width"] <= 390


def test_entries_of_one_strategy_are_named_by_the_parameters_in_which_they_differ(opened: Open) -> None:
    page = opened(over_budgets("m(a=1,b=(2,3),c=x)", "m(a=4,b=(2,3),c=x)", "other(a=1,b=2)"))
    for place in ("#names label", "#table tbody th.strategy", "#plot text.name"):
        texts = {text.strip() for text in page.locator(place).all_text_contents()}
        assert {"m(a=1)", "m(a=4)", "other(a=1,b=2)"} <= texts, place
    assert page.locator("#table th[title='m(a=1,b=(2,3),c=x)']").count() == 1
