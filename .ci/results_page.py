"""Write the table of the published boards into docs/results/index.md: networks, images and leaders at .5 and .3."""

import math
from pathlib import Path

from claims_page import RESULTS, with_table
from tabulate import tabulate

from sparsebench.board import views
from sparsebench.board.columns import BY_KEY, Row, text_of
from sparsebench.board.judge import Leaderboard, Ranking, judge
from sparsebench.board.reading import DENSE, dense_of, read
from sparsebench.records.table import ITEMS

LEADERBOARD = Path(__file__).resolve().parents[1] / "leaderboard"
NAMES = ("vit-s", "vit-s-three", "embedded", "detail", "tuned", "quick")
BUDGETS = ("0.5", "0.3")
ACCURACY = BY_KEY["accuracy"]._replace(interval=False)
HEADINGS = ["board, schedules", "networks, images", "relevant tokens", "dense, %"]
PAGE = RESULTS / "index.md"


def rows_of(name: str, board: Leaderboard) -> list[list[str]]:
    """Return a row for the main task of a board, and for each further setting of it."""
    return [row_of(name, ranking) for ranking in (*board.rankings[:1], *board.sections)]


def row_of(name: str, ranking: Ranking) -> list[str]:
    """Return the name of a board and its schedules, networks and images, share of relevant tokens, and leaders."""
    comparison = ranking.comparison
    best = views.best(ranking).rows
    without_strategy = next(row for row in best if row["best"] == DENSE)
    leaders = {str(row["budget"]): row for row in best if row["best"] != DENSE}
    dense = dense_of(comparison.tested)
    budgets = ranking.rows["budget"]
    schedules = "default"
    if budgets.str.contains("auto").any():
        schedules = "chosen"
    elif budgets.str.contains("@").any():
        schedules = "stated"
    return [
        f"[{name}]({name}.md), {schedules}",
        f"{len(comparison.seeds)}, {int(dense[ITEMS].iloc[0]):,}",
        "-" if math.isnan(comparison.relevant) else f"{comparison.relevant:.0%}",
        text_of(without_strategy, ACCURACY),
        *(leader(leaders.get(budget)) for budget in BUDGETS),
    ]


def leader(row: Row | None) -> str:
    """Return the most accurate strategy at a budget, its accuracy, its gain over random tokens, and how many tie."""
    if row is None or row["best"] is None:
        return "not measured"
    gain = text_of(row, BY_KEY["random_delta"])
    return f"`{row['best']}` {text_of(row, ACCURACY)}; {gain}; {row['n_equal']}"


if __name__ == "__main__":
    rows = [row for name in NAMES for row in rows_of(name, judge(read(LEADERBOARD / name)))]
    headings = HEADINGS + [f"best at {budget}; ties" for budget in BUDGETS]
    table = tabulate(rows, headings, tablefmt="pipe", disable_numparse=True) + "\n"
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "board table", table), encoding="utf-8")
