import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from flats import Flat, build, flat, in_blocks

from sparsebench.board import views
from sparsebench.board.columns import keys_of
from sparsebench.board.judge import Ranking, judge
from sparsebench.board.tables import ALL, Choice, render
from sparsebench.errors import UserError


def seeded(strategy: str, values: list[float], macs: float, budget: str = "", task: str = "composite") -> list[Flat]:
    about = {"budget": budget or f"macs {macs:g}", "macs_ratio": macs, "n_train": 100}
    return [
        flat(strategy, seed, task, cell_id=f"{task} {strategy} {macs} {seed}", accuracy=value, **about)
        for seed, value in enumerate(values)
    ]


def rankings(*parts: list[Flat]) -> list[Ranking]:
    return judge([row for part in parts for row in part]).rankings


DENSE = seeded("dense", [0.80, 0.81, 0.79], 1.0)
GOOD = seeded("good", [0.80, 0.82, 0.79], 0.5)
CHEAP = seeded("good", [0.7, 0.71, 0.68], 0.25)
BAD = seeded("bad", [0.40, 0.41, 0.39], 0.505)
SEER = seeded("oracle", [0.99, 0.98, 0.99], 0.5)


def test_each_two_ranked_rows_are_compared_once_the_better_one_first() -> None:
    rows = views.pairs(rankings(DENSE, GOOD, BAD, SEER)).rows
    assert {(row["strategy"], row["other"]) for row in rows} == {("good", "dense"), ("good", "bad"), ("dense", "bad")}
    assert rows[0]["other"] == "bad" and rows[0]["told"] == "yes" and rows[0]["p"] <= 0.05
    assert rows[-1]["told"] == "no" and rows[-1]["difference"] == pytest.approx(0.01 / 3)
    assert rows[-1]["difference_low"] < 0 < rows[-1]["difference_high"] and rows[-1]["n_seeds"] == 3
    assert all(list(row) == keys_of(views.PAIRS) for row in rows)


def test_rows_of_equal_cost_are_ranked_among_themselves() -> None:
    rows = [row for row in views.matched(rankings(DENSE, GOOD, CHEAP, BAD, SEER)).data.rows if "MACs" in row["matched"]]
    assert [(row["matched"], row["rank"], row["strategy"]) for row in rows] == [
        ("at 0.50 of dense MACs", "1", "good"), ("at 0.50 of dense MACs", "2", "bad"),
    ]  # fmt: skip


def test_cheapest_row_as_accurate_as_dense_is_named() -> None:
    """Of each strategy the cheapest row as accurate as dense is named and nothing is interpolated."""
    rows = [
        row
        for row in views.matched(rankings(DENSE, GOOD, CHEAP, BAD)).data.rows
        if row["matched"] == "at dense accuracy"
    ]
    assert [(row["strategy"], row["macs_ratio"]) for row in rows] == [("good", 0.5), ("bad", None)]
    near = seeded("near", [0.7992, 0.8092, 0.7892], 0.3)
    rows = views.matched(rankings(DENSE, near)).data.rows
    assert rows[-1]["strategy"] == "near" and rows[-1]["macs_ratio"] == 0.3  # within a tenth of a point
    failed = [DENSE[0] | {"status": "failed", "reason": "x", "repetition": 3, "cell_id": "failed"}]
    rows = views.matched(rankings(DENSE, failed, GOOD, BAD)).data.rows  # dense is not ranked
    assert {row["matched"] for row in rows} == {"at 0.50 of dense MACs"}


SETTING = '[{"name":"folder","params":{}},{"name":"timm","params":{"arch":"deit_small","precision":"bfloat16"}}]'


def measured(strategy: str, accuracy: float, macs: float, speed: float, **more: Any) -> list[Flat]:
    rows = seeded(strategy, [accuracy, accuracy + 0.01, accuracy - 0.01], macs, task="folder")
    about = {
        "setting": SETTING, "macs_ratio_asked": macs, "macs": macs * 4.6e9, "accuracy_top5": 0.95,
        "parameters": 22.05e6, "images_per_s": speed, "timed_batch": 200.0, "environment": "here", "device": "H100",
    }  # fmt: skip
    return [row | about | more for row in rows]


PAPER_ROWS = [
    *measured("dense", 0.798, 1.0, 1000.0),
    *measured("tome", 0.78, 0.5, 1500.0),
    *measured("evit", 0.79, 0.5, 1600.0, parameters=None, accuracy_top5=None),
    *measured("tome", 0.70, 0.25, 2345.0),
    *measured("evit", 0.7001, 0.25, 2000.0, environment="there"),
    *measured("oracle", 0.99, 0.5, 1.0),
]


@pytest.fixture(scope="module")
def ranked() -> list[Ranking]:
    return rankings(PAPER_ROWS)


def of_paper(rows: list[Flat], form: str, choice: Choice = ALL) -> str:
    return render(views.paper(rankings(rows)), form, choice)


def shown_in_markdown(text: str) -> list[dict[str, str]]:
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_the_table_of_a_paper_is_sorted_by_budget_and_accuracy(ranked: list[Ranking]) -> None:
    """The table of a paper has dense and then each budget with its most accurate strategy first."""
    rows = json.loads(render(views.paper(ranked), "json"))
    assert [(row["strategy"], row["budget"]) for row in rows] == [
        ("dense", "macs 1"), ("evit", "macs 0.5"), ("tome", "macs 0.5"), ("evit", "macs 0.25"), ("tome", "macs 0.25"),
    ]  # fmt: skip
    assert all(list(row) == keys_of(views.PAPER) for row in rows)
    judged = {(row["strategy"], row["budget"]): row for row in build(PAPER_ROWS)}
    for row in rows[1:]:
        of_board = judged[row["strategy"], row["budget"]]
        for key in ("macs", "macs_ratio", "accuracy", "accuracy_delta", "accuracy_delta_low", "accuracy_delta_high"):
            assert row[key] == pytest.approx(of_board[key])
    assert [row["speed_up"] for row in rows] == [1.0, 1.6, 1.5, None, 2.345]  # not of another machine
    assert [row["parameters"] for row in rows][:3] == [22.05e6, None, 22.05e6] and rows[1]["accuracy_top5"] is None


def test_numbers_have_units_for_people(ranked: list[Ranking]) -> None:
    """People see percent points and thousand millions and what was timed."""
    text = render(views.paper(ranked), "md")
    dense, evit, tome, *_ = shown_in_markdown(text)
    assert dense["top-1, %"] == "79.8" and dense["gain over dense, points"] == "-" and dense["params, M"] == "22.1"
    assert tome["GMACs"] == "2.30" and tome["top-5, %"] == "95.0" and tome["speed-up"] == "1.50"
    assert tome["gain over dense, points"].startswith("-1.8 [") and evit["params, M"] == evit["top-5, %"] == "-"
    for detail in ("deit", "H100", "bfloat16", "batch 200", "oracle"):
        assert detail in text
    old = [{key: x for key, x in row.items() if key not in ("parameters", "timed_batch")} for row in PAPER_ROWS]
    text = of_paper(old, "md")
    row, *_ = shown_in_markdown(text)
    assert "params, M" not in row and "batch" not in text


def test_a_budget_that_is_no_share_is_said_with_the_method() -> None:
    fixed = measured("tome", 0.78, 0.5, 1500.0, budget="13 a block", macs_ratio_asked=None)
    placed = measured("evit", 0.79, 0.5, 1600.0, **in_blocks(0.5, 3, 6, 9))
    rows = json.loads(of_paper([*measured("dense", 0.8, 1.0, 1.0), *fixed, *placed], "json"))
    assert {row["method"] for row in rows} == {"dense", "tome, 13 a block", "evit, @3,6,9"}


def test_without_a_ranked_strategy_there_is_no_table_of_a_paper() -> None:
    with pytest.raises(UserError, match="no strategy is ranked"):
        views.paper(rankings(GOOD, CHEAP))


def test_latex_of_a_paper_marks_the_best_of_each_budget() -> None:
    """LaTeX of a paper has the best of each budget in bold rules between budgets a label and two lines."""
    worse = [*measured("worse", 0.6, 0.5, 1.0), *measured("worse", 0.5, 0.25, 1.0)]
    text = of_paper([*PAPER_ROWS, *worse], "latex")
    bold = re.findall(r"^(\w+) .*\\textbf\{([\d.]+)\}", text, re.MULTILINE)
    assert bold == [("evit", "79.0"), ("evit", "70.0"), ("tome", "70.0")]  # all rows that show the same number
    assert text.count(r"\midrule") == 3 and text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    assert "$-$1.8 [" in text and not re.search(r"[ \[]-\d", text)
    assert re.search(r"^\\label\{tab:[a-z0-9-]+\}$", text, re.MULTILINE)
    (caption,) = re.findall(r"\\caption\{(.*)\}", text)
    assert len(caption) <= 230  # two lines of a page
    assert text.count("{") == text.count("}")


def test_one_strategy_a_budget_is_no_best_nor_are_all_that_show_the_same() -> None:
    alike = [*measured("evit", 0.78, 0.5, 1.0), *measured("tome", 0.7801, 0.5, 1.0)]
    for rows in (PAPER_ROWS[:6], [*PAPER_ROWS[:3], *alike]):
        text = of_paper(rows, "latex")
        assert "textbf" not in text and "Bold" not in text


def test_names_of_strangers_are_text_in_latex(tmp_path: Path) -> None:
    name = "\\end{table*} $x_1^2$ & 50% ~#{}|<>`\u202e\u4e2d\x01\x02\x03\n\\input{x}"
    rows = [row | {"strategy": name, "device": name} for macs in (0.5, 0.25) for row in measured("x", 0.79, macs, 1.0)]
    table = of_paper([row | {"task": name} for row in [*PAPER_ROWS, *rows]], "latex")
    assert table.count(r"\end{table*}") == 1 and r"\input" not in table and "\x01" not in table
    assert table.count("\\textbackslash") > 2  # in the table and in the caption
    if shutil.which("pdflatex") is None:
        return
    head = r"\documentclass{article}\usepackage[utf8]{inputenc}\usepackage{booktabs,graphicx}\begin{document}"
    (tmp_path / "a.tex").write_text(f"{head}\n{table}See~\\ref{{x}}.\\end{{document}}\n")
    call = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "a.tex"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def timed(folder: Path, **other: Any) -> Path:
    """Write the results of `sparsebench speed`, with `other` values in all rows."""
    base = {"network": "deit_small", "mode": "eager", "precision": "bfloat16", "device": "H100", "memory": 2e9} | other
    rows = [
        {"macs": 4.6e9 * float(budget[5:] or 1), "macs_ratio": float(budget[5:] or 1)}
        | base
        | {"strategy": name, "budget": budget, "batch": batch, "latency": latency, "speed_up": up,
                "images_per_s": batch / latency if latency else None}
        for name, budget, batch, latency, up in (
            ("dense", "", 1, 0.004, 1.0), ("dense", "", 64, 0.04, 1.0), ("dense", "", 256, None, None),
            ("tome", "macs 0.5", 1, 0.005, 0.8), ("tome", "macs 0.5", 64, 0.025, 1.6),
            ("evit", "macs 0.25", 1, 0.003, 1.3),
        )
    ]  # fmt: skip
    rows.append(rows[3] | {"mode": "compiled", "latency": 1e-9})
    folder.mkdir()
    (folder / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_times_of_speed_are_joined_by_network_strategy_and_budget(ranked: list[Ranking], tmp_path: Path) -> None:
    report = views.paper(ranked, timed(tmp_path / "s"))
    rows = {(row["strategy"], row["budget"]): row for row in report.data.rows}
    keys = ("images_per_s", "speed_up", "latency", "memory")
    assert [rows["dense", "macs 1"][key] for key in keys] == pytest.approx([1600, 1, 4, 2e9])
    assert [rows["tome", "macs 0.5"][key] for key in keys] == pytest.approx([2560, 1.6, 5, 2e9])
    assert [rows["evit", "macs 0.25"][key] for key in keys] == [None, None, 3.0, None]  # batch 64 is not measured
    assert [rows["tome", "macs 0.25"][key] for key in keys] == [None] * 4
    (table,) = report.tables
    assert "batch 64" in table.legend[0]
    assert table.legend[-1] == "Without times: evit (macs 0.5), tome (macs 0.25)."
    assert "2560" in render(report, "md").replace(",", "") and r"\begin{tabular}" in render(report, "latex")


@pytest.mark.parametrize("other", [{"network": "vit_base"}, {"precision": "float32"}, {"macs": 1e9}])
def test_times_of_something_else_are_not_joined_and_a_line_says_so(
    ranked: list[Ranking], other: Any, tmp_path: Path
) -> None:
    (table,) = views.paper(ranked, timed(tmp_path / "s", **other)).tables
    assert "has no times of these strategies on deit_small in bfloat16" in table.legend[-1]


def test_a_folder_without_times_is_refused(ranked: list[Ranking], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"speed.jsonl cannot be read"):
        views.paper(ranked, tmp_path)
    (tmp_path / "speed.jsonl").write_text('{"p50": 1}\n')
    with pytest.raises(UserError, match="measure again"):
        views.paper(ranked, tmp_path)


def test_latex_splits_a_long_table_between_budgets() -> None:
    """LaTeX parts a table between budgets where a page has no room for it."""
    many = [row for macs in (0.5, 0.25) for i in range(30) for row in measured(f"s{i}", macs + i / 100, macs, 1.0)]
    first, second = of_paper([*measured("dense", 0.8, 1.0, 1.0), *many], "latex").split(r"\end{table*}")[:2]
    assert [len(re.findall(r"^s\d+", text, re.MULTILINE)) for text in (first, second)] == [30, 30]
    assert r"\label" in first and r"\label" not in second and "Continued." in second


def test_sets_of_pictures_have_a_column_each_and_ranks_within_a_budget() -> None:
    def seen(images: str, values: dict[str, float]) -> list[Flat]:
        setting = json.dumps([{"params": {"images": images}}, {"params": {"arch": "tiny"}}])
        rows = (seeded(name, [x, x + 0.01, x - 0.01], 1.0 if name == "dense" else 0.5) for name, x in values.items())
        more = {"setting": setting}
        return [row | more | {"cell_id": f"{images} {row['cell_id']}"} for part in rows for row in part]

    usual, hard = {"dense": 0.8, "a": 0.75, "b": 0.5}, {"dense": 0.3, "a": 0.1, "b": 0.25}
    (table,) = views.shifts(judge([*seen("sketch", hard), *seen("imagenet", usual)], "task").rankings).tables
    assert [column.heading for column in table.columns[2:]] == ["imagenet", "rank", "sketch", "rank"]
    rows = [(row["strategy"], row["accuracy_0"], row["rank_0"], row["accuracy_1"], row["rank_1"]) for row in table.rows]
    assert [row[0] for row in rows] == ["dense", "a", "b"] and rows[0][2::2] == ("", "")
    assert [row[2::2] for row in rows[1:]] == [("1", "2"), ("2", "1")]
    assert rows[2][1::2] == pytest.approx((0.5, 0.25))
    assert not table.legend, "two strategies have no order to speak of"


def test_sets_of_pictures_say_how_alike_the_order_of_strategies_is() -> None:
    def seen(images: str, values: Sequence[float]) -> list[Flat]:
        setting = json.dumps([{"params": {"images": images}}, {"params": {"arch": "tiny"}}])
        rows = (
            seeded(name, [x, x + 0.01, x - 0.01], macs)
            for macs in (0.5, 0.7)
            for name, x in zip("abcd", values, strict=True)
        )
        rows = [row for part in (*rows, seeded("dense", [max(values) + 0.05] * 3, 1.0)) for row in part]
        return [row | {"setting": setting, "cell_id": f"{images} {row['cell_id']}"} for row in rows]

    usual, same, turned = (0.8, 0.7, 0.6, 0.5), (0.5, 0.4, 0.3, 0.2), (0.1, 0.2, 0.4, 0.3)
    every = [*seen("imagenet", usual), *seen("v2", same), *seen("sketch", turned)]
    (table,) = views.shifts(judge(every, "task").rankings).tables
    (line,) = table.legend
    assert "imagenet" in line and "v2 1.00" in line and "sketch -0.67" in line
