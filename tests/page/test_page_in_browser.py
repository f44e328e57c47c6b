"""The page as readers have it: opened from a file in a real browser, which reports what goes wrong (see `opened`)."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_boards import board_of, row

from sparsebench.board.board import Board, BudgetBoard, BudgetCurve
from sparsebench.board.columns import keys_of, text_of
from sparsebench.page import render
from sparsebench.page.page import columns_with_values

Open = Callable[..., Any]
NARROW = {"viewport": {"width": 390, "height": 800}}


def strategies(page: Any) -> list[str]:
    return page.locator("#table tbody th.strategy").all_inner_texts()


def header(page: Any, key: str) -> Any:
    return page.locator(f'#table thead [data-sort="{key}"]')


def facet(page: Any, name: str) -> Any:
    return page.locator("#facets").get_by_label(name, exact=True)


def until(page: Any, holds: Callable[[], bool]) -> None:
    """Wait until something holds; the page's policy forbids to wait inside it."""
    for _ in range(500):
        if holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it has not come to hold in ten seconds")


def said(page: Any) -> str:
    return page.locator("#said").inner_text()


def clipboard(page: Any) -> str:
    return page.evaluate("navigator.clipboard.readText()")


def test_a_click_sorts_and_a_second_turns_it_around_and_oracles_stay_apart(opened: Open, board: Board) -> None:
    page = opened(board)
    assert strategies(page) == ["dense", "mine", "random", "oracle"]
    header(page, "accuracy").click()
    assert strategies(page) == ["dense", "mine", "random", "oracle"]
    assert header(page, "accuracy").locator("..").get_attribute("aria-sort") == "descending"
    header(page, "accuracy").click()
    assert strategies(page) == ["random", "mine", "dense", "oracle"]
    assert said(page) == "Sorted by accuracy, rising."
    header(page, "accuracy").click()
    assert strategies(page) == ["dense", "mine", "random", "oracle"]
    assert page.locator("#table [aria-sort]").count() == 0
    assert "Oracles" in page.locator("#table tr.divider").inner_text()
    assert page.locator("#table tr.oracle td.rank").inner_text() == "-"


def test_not_reached_is_larger_than_any_number_and_nothing_is_last(opened: Open) -> None:
    values = {"none": None, "ten": 10.0, "never": "not reached", "two": 2.0}
    page = opened(board_of([row(name, 0.5, sample_complexity=value) for name, value in values.items()]))
    header(page, "sample_complexity").click()
    assert strategies(page) == ["two", "ten", "never", "none"]
    header(page, "sample_complexity").click()
    assert strategies(page) == ["never", "ten", "two", "none"]


def test_ranks_sort_as_numbers(opened: Open) -> None:
    page = opened(board_of([row(name, 0.5, rank=rank) for name, rank in {"a": "10-12", "b": "2-9", "c": 1}.items()]))
    header(page, "rank").click()
    assert strategies(page) == ["c", "b", "a"]


def test_filters_search_and_columns_choose_what_is_there(opened: Open, board: Board) -> None:
    page = opened(board)
    facet(page, "kind").select_option("baseline")
    assert strategies(page) == ["dense", "random"] and page.locator("#count").inner_text() == "2 of 4 rows"
    page.get_by_label("Search").fill("DENS")
    assert strategies(page) == ["dense"]
    page.get_by_label("Search").fill("nowhere")
    assert "No row is left" in page.locator("#table tbody").inner_text()
    page.get_by_role("button", name="Reset").click()
    assert len(strategies(page)) == 4
    page.locator("#picker summary").click()
    page.locator("#columns").get_by_label("accuracy", exact=True).uncheck()
    assert header(page, "accuracy").count() == 0 and header(page, "macs_ratio").count() == 1


def test_by_task_has_tasks_to_filter_and_charts_follow(opened: Open, board: Board) -> None:
    page = opened(board)
    assert page.locator("#groups").is_visible() and page.locator("#cost svg").count() == 1
    page.get_by_role("button", name="By task").click()
    until(page, lambda: page.locator("#cost svg").count() == 2)
    facet(page, "task").select_option("theory")
    until(page, lambda: page.locator("#cost svg").count() == 1)
    assert len(strategies(page)) == 4
    assert page.locator("#curves").is_visible() and not page.locator("#groups").is_visible()


def test_the_address_holds_the_state_and_gives_it_back(opened: Open, board: Board) -> None:
    page = opened(board)
    page.get_by_role("button", name="By task").click()
    header(page, "accuracy").click()
    header(page, "accuracy").click()
    facet(page, "kind").select_option("baseline")
    page.locator("#picker summary").click()
    page.locator("#columns").get_by_label("budget", exact=True).uncheck()
    table, address = page.locator("#table").inner_text(), page.url
    again = opened(board, "#" + address.split("#")[1])
    assert again.locator("#table").inner_text() == table
    assert facet(again, "kind").input_value() == "baseline"
    again.reload()
    again.wait_for_selector("html[data-charts]")
    assert again.locator("#table").inner_text() == table


def test_back_and_forward_go_through_what_was_chosen(opened: Open, board: Board) -> None:
    page = opened(board)
    header(page, "accuracy").click()
    header(page, "accuracy").click()
    page.get_by_label("Search").press_sequentially("ra")  # typing is no step of its own
    assert strategies(page) == ["random", "oracle"]
    page.go_back()
    until(page, lambda: page.locator("[aria-sort=descending]").count() == 1)
    assert len(strategies(page)) == 4 and page.get_by_label("Search").input_value() == ""
    page.go_forward()
    until(page, lambda: len(strategies(page)) == 2)
    assert page.get_by_label("Search").input_value() == "ra"


def test_an_address_of_nonsense_is_the_board_as_it_is(opened: Open, board: Board) -> None:
    page = opened(board, "#view=nowhere&sort=-none,accuracy&cols=accuracy,none&f.none=1&cost=%22%3E&q=")
    assert page.locator("#table thead th").count() == 1
    assert page.locator("#table tbody td.accuracy").count() == 4


def picked(board: Board) -> tuple[list[Any], list[Any]]:
    """Return the columns and rows that the address below asks for."""
    columns = [
        c for c in columns_with_values(board.rows) if c.key in ("strategy", "budget", "accuracy", "sample_complexity")
    ]
    return columns, [board.rows[at] for at in (2, 0)]


PICKED = "#cols=strategy,budget,accuracy,sample_complexity&sort=accuracy&f.kind=baseline"


def test_markdown_and_latex_are_what_the_table_shows(opened: Open, board: Board) -> None:
    board.rows[2]["strategy"] = "a|b_c & 100 %\n{x}\\"
    page, (columns, rows) = opened(board, PICKED), picked(board)
    cells = [[text_of(r, c) for c in columns] for r in rows]
    page.get_by_role("button", name="Markdown").click()
    until(page, lambda: said(page).startswith("Copied"))
    assert said(page) == "Copied 2 rows, 4 columns as Markdown."
    lines = clipboard(page).splitlines()
    assert lines[:2] == ["| strategy | budget | accuracy | N50 |", "|:---|:---|---:|---:|"]
    assert lines[2] == f"| a\\|b_c & 100 % {{x}}\\ | {' | '.join(cells[0][1:])} |"
    assert lines[3] == f"| {' | '.join(cells[1])} |" and "0.812 [0.802, 0.823]" in lines[3]
    page.get_by_role("button", name="LaTeX").click()
    until(page, lambda: "LaTeX" in said(page))
    text = clipboard(page)
    assert r"a|b\_c \& 100 \% \{x\}\textbackslash{} & macs 0.5 & " in text
    assert text.startswith("\\begin{tabular}{llrr}\n\\toprule\nstrategy & budget & accuracy & N50 \\\\\n")


def test_csv_has_values_in_full_and_intervals_of_their_own(opened: Open, board: Board) -> None:
    board.rows[2]["strategy"] = 'a,"b"\nc'
    page, (columns, rows) = opened(board, PICKED), picked(board)
    page.get_by_role("button", name="CSV").click()
    until(page, lambda: said(page).startswith("Copied"))
    found = list(csv.DictReader(io.StringIO(clipboard(page))))
    keys = keys_of(tuple(columns))
    assert [list(r) for r in found] == [keys] * 2
    for got, wanted in zip(found, rows, strict=True):
        for key in keys:
            value = wanted.get(key)
            assert (float(got[key]) == pytest.approx(value, rel=1e-7)) if isinstance(value, float) else (
                got[key] == ("" if value is None else value))  # fmt: skip


def test_bibtex_is_copied_as_it_is(opened: Open, board: Board) -> None:
    page = opened(board)
    page.get_by_role("button", name="BibTeX").click()
    until(page, lambda: said(page).startswith("Copied"))
    assert clipboard(page) == board.bibtex[0] + "\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_the_reader_chooses(opened: Open, board: Board, scheme: str) -> None:
    page = opened(board, color_scheme=scheme)

    def lightness() -> str:
        red = page.evaluate("Number(/\\d+/.exec(getComputedStyle(document.body).backgroundColor)[0])")
        return "light" if red > 127 else "dark"

    button = page.get_by_role("button", name="Dark")
    assert lightness() == scheme and button.get_attribute("aria-pressed") == str(scheme == "dark").lower()
    button.click()
    assert lightness() != scheme and button.get_attribute("aria-pressed") == str(scheme != "dark").lower()
    page.reload()
    assert lightness() != scheme


def test_everything_is_reached_and_worked_with_the_keyboard(opened: Open, board: Board) -> None:
    page = opened(board)
    wanted = ["Skip to the table", "Dark", "All tasks", "By task", "search", "kind", "Columns", "accuracy", "CSV",
              "Numbers"]  # fmt: skip
    name = "(e => e.labels?.[0]?.textContent || e.textContent || e.id)(document.activeElement)"
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(name))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body"), reached[-1]
    assert [one for one in wanted if not any(one.lower() in other.lower() for other in reached)] == []
    header(page, "accuracy").focus()
    page.keyboard.press("Enter")
    until(page, lambda: page.locator("[aria-sort=descending]").count() == 1)
    page.keyboard.press("Space")
    until(page, lambda: strategies(page) == ["random", "mine", "dense", "oracle"])
    assert page.evaluate("document.activeElement.dataset.sort") == "accuracy"  # the focus stays
    page.locator("#picker summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    until(page, lambda: header(page, "rank").count() == 0)
    assert page.locator("#picker").get_attribute("open") is not None
    page.keyboard.press("Escape")
    assert page.locator("#picker").get_attribute("open") is None
    page.get_by_role("link", name="Skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "scroll" and "cols=" in page.url


@pytest.mark.parametrize("options", [{"color_scheme": "light"}, {"color_scheme": "dark"}, NARROW], ids=str)
def test_axe_finds_nothing_serious(opened: Open, board: Board, options: dict[str, Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install 'sparsebench[test]'")
    page = opened(board, "#sort=accuracy&q=e", **options)
    page.locator("#curves .numbers summary").click()
    page.locator("#picker summary").click()
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")] == []


def test_charts_say_in_words_what_they_show(opened: Open, board: Board) -> None:
    page = opened(board)
    labels = [svg.get_attribute("aria-label") for svg in page.locator("svg[role=img]").all()]
    assert len(labels) == 3
    assert "4 rows" in labels[0] and "Pareto front: " in labels[0] and "dense (1.00, 0.813)" in labels[0]
    page.locator("#curves .numbers summary").click()
    rows = page.locator("#curves .numbers tbody tr")
    rows.nth(7).wait_for(state="attached")  # they are made when it is opened
    assert rows.count() == 8


def test_a_curve_is_drawn_while_its_button_is_pressed(opened: Open, board: Board) -> None:
    page = opened(board)
    chip = page.locator("#curves .chips button", has_text="mine")
    lines = page.locator("#curves svg [data-mark=line] path")
    assert lines.count() == 4 and chip.get_attribute("aria-pressed") == "true"
    chip.click()
    assert lines.count() == 3 and chip.get_attribute("aria-pressed") == "false"


def test_of_many_rows_few_are_drawn_and_the_filters_choose_which(opened: Open) -> None:
    page = opened(board_of([row(f"s{k}", 1 - k / 100) for k in range(60)]))
    assert (
        page.locator("#curves .chips button").count() == 40
        and page.locator("#curves [data-mark=dot] path").count() == 16
    )
    assert page.locator("#groups [data-mark=bar] rect").count() == 80
    page.get_by_label("Search").fill("s59")
    until(page, lambda: page.locator("#groups [data-mark=bar] rect").count() == 2)
    assert page.locator("#curves .chips button").inner_text() == "s59, macs 0.5"


def test_hostile_names_are_text(opened: Open) -> None:
    names = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>", "a\u202eb", "'\"`", "y" * 10_000,
             "${alert(3)}", "constructor", "__proto__"]  # fmt: skip
    rows = [row(name, 0.9 - k / 20, budget=name, device=name, checks=name) for k, name in enumerate(names)]
    page = opened(board_of(rows, notes=names, suites=names, bibtex=names))
    assert strategies(page) == names
    assert page.locator("main script, main img[onerror], main a").count() == 0
    for name in ("checks", "budget", "strategy"):
        header(page, name).click()
    facet(page, "budget").select_option(names[0])
    assert strategies(page) == [names[0]]
    page.get_by_role("button", name="By task").click()
    assert strategies(page) == [names[0]] * 2


@pytest.mark.parametrize("options", [{}, NARROW], ids=["wide", "narrow"])
def test_long_names_leave_the_page_as_wide_as_it_is(opened: Open, options: dict[str, Any]) -> None:
    long = "x" * 10_000
    page = opened(board_of([row(long, 0.5, budget=long), row("dense", 0.6)], notes=[long], suites=[long]), **options)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_of_a_long_table_the_rows_in_sight_are_there_and_all_are_counted_sorted_and_copied(opened: Open) -> None:
    rows = [row(f"s{k}", k / 2000, kind="oracle" if k % 2 else "deployable") for k in range(1000)]
    page = opened(Board(rows=rows, by_task=[], notes=[]))
    assert len(strategies(page)) < 100 and page.locator("#table").get_attribute("aria-rowcount") == "1002"
    header(page, "accuracy").click()
    assert strategies(page)[0] == "s998"
    page.locator("#scroll").evaluate("e => e.scrollTo(0, e.scrollHeight)")
    until(page, lambda: strategies(page)[-1] == "s1")
    assert page.locator("#table tr:has(th:text-is('s1'))").get_attribute("aria-rowindex") == "1002"
    page.get_by_label("Search").fill("s99")
    assert len(strategies(page)) == 11 and strategies(page)[0] == "s998"
    page.get_by_label("Search").fill("")
    page.get_by_role("button", name="CSV").click()
    until(page, lambda: said(page).startswith("Copied"))
    assert len(clipboard(page).splitlines()) == 1001


def test_without_scripts_there_is_a_plain_table(opened: Open, board: Board, chromium: Any) -> None:
    path = opened(board).url
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path)
    table = page.get_by_role("table")
    assert table.locator("tbody tr").count() == 4 and "not reached" in table.inner_text()
    assert not page.get_by_role("button").all() and page.get_by_text("something to know").is_visible()
    context.close()


def test_a_board_without_rows_says_so(opened: Open) -> None:
    page = opened(Board(rows=[], by_task=[], notes=["mine on theory: 3 cells failed: it broke"]))
    assert "it broke" in page.locator("main").inner_text() and page.locator("#count").inner_text() == "0 rows"
    assert page.locator("section.chart:not([hidden])").count() == 0


def test_the_policy_stops_what_gets_into_the_page_all_the_same(chromium: Any, board: Board, tmp_path: Path) -> None:
    path = tmp_path / "leaderboard.html"
    added = b"<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><p style='color: red'>here</p></main>"
    path.write_bytes(render(board).replace(b"</main>", added))
    context = chromium.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("requestfinished", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-charts]")
    assert page.evaluate("window.ran") is None and asked == [path.as_uri()]
    context.close()


def over_budgets(task: str = "composite") -> BudgetBoard:
    def curve(strategy: str, kind: str, spent: tuple[float, ...], accuracy: tuple[float, ...]) -> BudgetCurve:
        return BudgetCurve(
            strategy, kind, spent, spent, accuracy, *(tuple(y + d for y in accuracy) for d in (-0.1, 0.1))
        )

    curves = [
        curve("dense", "baseline", (1.0,), (0.8,)),
        *(curve(f"mine_{k}", "deployable", (0.3, 0.5), (0.5 + k / 50, 0.6 + k / 50)) for k in range(9)),
        curve("random_inside", "baseline", (0.3, 0.5), (0.3, 0.4)),
        curve("dear", "deployable", (64.0, 65.0), (0.9, 0.9)),
        curve("oracle", "oracle", (0.3, 0.5), (0.9, 0.9)),
    ]
    rows = [
        {"rank": "1-2", "strategy": one.strategy, "kind": one.kind, "kept_accuracy": 0.5, "kept_accuracy_low": 0.4,
         "kept_accuracy_high": 0.6, "accuracy_at_0.5": one.accuracy[0], "accuracy_at_0.5_spent": 0.31}
        for one in curves
    ]  # fmt: skip
    return BudgetBoard(
        task, "vit", 600, "scratch", (0.5, 0.3), 0.5, rows, curves, ["1 of 3 pairs differ significantly"]
    )


def chip(page: Any, name: str) -> Any:
    return page.locator("#budgets .chips").get_by_role("button", name=name, exact=True)


def test_a_board_of_curves_opens_with_them(opened: Open, board: Board) -> None:
    page = opened(replace(board, budgets=[over_budgets(), over_budgets("spurious")]))
    assert page.locator("#budgets svg").count() == 2
    assert [page.locator("section").nth(k).get_attribute("id") for k in (0, 1)] == ["best", "budgets"]
    ticks = page.locator("#budgets svg").first.locator('[data-mark="x-axis tick label"] text').all_text_contents()
    assert ticks and max(map(float, ticks)) == 1  # what costs 64 times as much does not squeeze the axis
    table = page.locator("#budgets table").first
    assert table.locator("tbody tr").count() == 13
    assert "0.500 [0.400, 0.600]" in table.inner_text() and "(0.31)" in table.inner_text()
    assert page.locator("#budgets").get_by_text("1 of 3 pairs differ significantly").count() == 2


def test_the_readers_choice_of_curves_is_drawn(opened: Open, board: Board) -> None:
    page = opened(replace(board, budgets=[over_budgets()]))
    pressed = {
        name: chip(page, name).get_attribute("aria-pressed") for name in ("mine_7", "mine_8", "random_inside", "oracle")
    }
    assert pressed == {"mine_7": "true", "mine_8": "false", "random_inside": "true", "oracle": "true"}
    dots = page.locator('#budgets svg [data-mark="dot"] circle, #budgets svg [data-mark="dot"] path')
    before = dots.count()
    chip(page, "mine_8").click()
    assert dots.count() == before + 2 and chip(page, "mine_8").get_attribute("aria-pressed") == "true"
    page.locator("#budgets summary").click()
    until(page, lambda: page.locator("#budgets .numbers tbody tr").count() == 1 + 2 * 12)


def test_curves_fit_a_narrow_screen_and_work_without_scripts(
    opened: Open, chromium: Any, board: Board, tmp_path: Path
) -> None:
    over = replace(board, budgets=[over_budgets()])
    page = opened(over, **NARROW)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    path = tmp_path / "plain.html"
    path.write_bytes(render(over))
    context = chromium.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(path.as_uri())
    assert plain.locator("#budgets table").first.is_visible() and not plain.locator("#budgets .plots").is_visible()
    context.close()
