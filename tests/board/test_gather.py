"""The board of a run's folder."""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flats import Flat, called, filled, flat, of_items, rows_in
from published_boards import first_record

from sparsebench.board import board as boards
from sparsebench.board.board import PNG, Board, board_of, gather
from sparsebench.board.columns import dicts
from sparsebench.board.comparison import about, comparisons_of
from sparsebench.board.judge import judge
from sparsebench.board.notes import notes_on
from sparsebench.board.published import page
from sparsebench.board.reading import MAIN, SUCCESS, describe, frame_of, read
from sparsebench.board.tables import Choice, render
from sparsebench.board.views import report
from sparsebench.records import manifests, store
from sparsebench.records.record import Part
from sparsebench.strategy.budget import Budget

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def record(strategy: str = "mine", seed: int = 0, **more: Any) -> Flat:
    return flat(strategy, seed, "theory", n_train=8, **{"revision": "abc", "environment": "", "success": None} | more)


def described(folder: Path, name: str, **more: Any) -> None:
    about = {"name": name, "revision": "abc", "kind": "deployable", "site": "input", "trained": False,
             "adaptive": False, "citation": "", "bibtex": f"@article{{{name}}}"}  # fmt: skip
    store.Store(folder).keep("strategies", about | more)


def marked(board: Board) -> dict[str, str | None]:
    return {row["strategy"]: row["trained"] for row in dicts(board.judged.rows)}


def test_strategies_say_whether_they_are_trained_and_what_to_cite(tmp_path: Path) -> None:
    described(tmp_path, "mine", trained=True)
    described(tmp_path, "other", bibtex="")
    described(tmp_path, "elsewhere")
    described(tmp_path, "third", revision="another")
    names = (called("mine", power=2), called("other"), called("third"))
    records = pd.DataFrame([record(accuracy=0.5) | name for name in names])
    board = board_of(describe(records, tmp_path), tmp_path)
    assert marked(board) == {"mine(power=2)": "yes", "other": "no", "third": ""}
    assert [entry for entry in board.bibtex if entry.startswith("@article")] == ["@article{mine}"]


@pytest.mark.parametrize("budgets", [(0.5,), (0.7, 0.3)], ids=["one budget", "curves"])
def test_a_variant_is_marked_and_a_note_says_how_it_differs(tmp_path: Path, budgets: tuple[float, ...]) -> None:
    described(tmp_path, "mine", variant="it skips the second half of the method")
    described(tmp_path, "other")
    sparse = [
        of_items(name, 0, share, accuracy, revision="abc") | called(name)
        for name, accuracy in (("mine", 0.85), ("other", 0.8))
        for share in budgets
    ]
    dense = of_items("dense", 0, 1, 0.9, revision="abc") | called("dense")
    board = board_of(describe(pd.DataFrame([dense, *sparse]), tmp_path), tmp_path)
    shown = report(board.judged, board.notes)
    marks = {row["strategy"]: row["variant"] or "" for table in shown.tables for row in table.rows}
    assert marks == {"dense": "", "mine": "yes", "other": ""}
    (about_the_best,) = shown.tables[0].legend
    assert "mine" in about_the_best and "other" not in about_the_best
    texts = {form: render(shown, form, Choice(width=60)) for form in ("table", "md", "latex")}
    texts["html"] = page(board).decode()
    for form, text in texts.items():
        assert text.count("variant") > 1, form
        assert "it skips the second half of the method" in text.replace("\n", " "), form


def test_boards_of_records_that_know_no_variants_have_no_mark(tmp_path: Path) -> None:
    described(tmp_path, "mine")
    records = pd.DataFrame([record(accuracy=0.5) | called(name) for name in ("mine", "dense")])
    board = board_of(describe(records, tmp_path), tmp_path)
    assert "variant" not in {column.key for column in board.judged.columns}
    assert "variant" not in render(report(board.judged, board.notes), "json")


def test_a_later_description_with_the_mark_counts(tmp_path: Path) -> None:
    described(tmp_path, "mine", how="drop", variant="it skips a half")
    described(tmp_path, "mine", how="drop")
    records = pd.DataFrame([record(accuracy=0.5) | called("mine")])
    assert list(describe(records, tmp_path)["differs"]) == ["it skips a half"]


CITED: list[tuple[dict[str, str], str | None]] = [
    ({"bibtex": "@article{a, url = {https://example.org/a_b?c=1}}"}, "https://example.org/a_b?c=1"),
    ({"bibtex": "@article{a, doi = {10.1000/abc.d(1)}}"}, "https://doi.org/10.1000/abc.d(1)"),
    ({"bibtex": "@article{a, journal = {arXiv preprint arXiv:2202.12015}}"}, "https://arxiv.org/abs/2202.12015"),
    ({"citation": "Shang et al., ICCV 2025, arXiv 2403.15388"}, "https://arxiv.org/abs/2403.15388"),
    ({"bibtex": "@article{a, url = {javascript:alert(1)}}"}, None),
    ({"bibtex": r"@inproceedings{a, doi = {10.1234/978-0-12\_7}}"}, "https://doi.org/10.1234/978-0-12_7"),
    ({"bibtex": r'@article{a, DOI="https://doi.org/10.1234/x{\_}y"}'}, "https://doi.org/10.1234/x_y"),
    ({"bibtex": "@article{a, doi = {10.1002/(SICI)1-2(19) 3}}"}, "https://doi.org/10.1002/(SICI)1-2(19)"),
    (
        {"bibtex": "@article{a, doi = {10.1002/1<2::AID#3>4.0;2-2}}"},
        "https://doi.org/10.1002/1%3C2::AID%233%3E4.0;2-2",
    ),
    (
        {"bibtex": r"@misc{a, url = {https://e.org/\~{}me/p(2),x\#sec\_1?q=50\%25}}"},
        "https://e.org/~me/p(2),x#sec_1?q=50%25",
    ),
    ({"bibtex": r"@misc{a, howpublished = {\url{https://e.org/w_(b)}, 2020}}"}, "https://e.org/w_(b)"),
    ({"citation": "One et al. 2021 (see https://e.org/a,b(1))."}, "https://e.org/a,b(1)"),
    (
        {"bibtex": "@misc{a, note = {Code: https://git.example.org/a}, doi = {10.1234/a.b}}"},
        "https://doi.org/10.1234/a.b",
    ),
    (
        {"bibtex": "@misc{a, note = {https://git.example.org/a}, eprint = {2101.00001}}"},
        "https://arxiv.org/abs/2101.00001",
    ),
    (
        {"citation": "One, doi:10.1234/a_b.", "bibtex": "@misc{a, note = {https://git.example.org/a}}"},
        "https://doi.org/10.1234/a_b",
    ),
    ({"citation": 'A. & B, "x"'}, "https://scholar.google.com/scholar?q=A.+%26+B%2C+%22x%22"),
]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str, str]]:
    """Return the papers of a board whose strategies cite what is in `CITED`, called by their places in it."""
    folder = tmp_path_factory.mktemp("cited")
    for place, (cited, _) in enumerate(CITED):
        described(folder, f"cites_{place}", **cited)
    records = pd.DataFrame([record(accuracy=0.5) | called(f"cites_{place}", power=2) for place in range(len(CITED))])
    return board_of(describe(records, folder), folder).papers


@pytest.mark.parametrize("place", range(len(CITED)))
def test_papers_have_addresses(papers: Mapping[str, tuple[str, str]], place: int) -> None:
    cited, address = CITED[place]
    expected = None if address is None else (cited.get("citation", ""), address)
    assert papers.get(f"cites_{place}") == expected


def test_environments_are_those_of_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "environments"
    folder.mkdir()
    for name, text in {"one": '{"python": "3.11", "cores": 2}', "two": "{}", "bad": "[1", "list": "[1]"}.items():
        (folder / f"{name}.json").write_text(text)
    used = ("one", "bad", "list", "gone", "")
    with caplog.at_level(logging.WARNING):
        board = board_of([record(seed=k, environment=name) for k, name in enumerate(used)], tmp_path)
    assert board.environments == {"one": {"python": "3.11", "cores": "2"}}
    assert all(f"{name}.json is left out" in caplog.text for name in ("bad", "list"))


def test_pictures_of_the_folder_are_in_it_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "MOST_BYTES", 30)
    for name, size in {"agreement": 14, "leaderboard": 9, "large": 17, "tokens": 16}.items():
        (tmp_path / f"{name}.png").write_bytes(PNG + bytes(size - len(PNG)))
    (tmp_path / "private.png").write_bytes(b"%!PS-Adobe")
    assert {name: len(png) for name, png in board_of([record()], tmp_path).pictures.items()} == {
        "agreement": 14,
        "tokens": 16,
    }


def rows_without(rows: Sequence[Flat], key: str) -> list[Flat]:
    return [{name: value for name, value in row.items() if name != key} for row in rows]


def test_a_folder_is_its_records_board(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    for settings in ([], ["1" * 64]):  # a suite that was run with other options is listed once
        store.Store(tmp_path).keep("suites", {"name": "quick", "version": 3, "settings": settings})
    records, board = rows_in(tmp_path), gather(tmp_path)
    judged = judge(records)
    by_task = judge(records, "task", judged)
    assert rows_without(dicts(board.judged.rows), "trained") == rows_without(dicts(judged.rows), "trained")
    assert rows_without(dicts(board.by_task.rows), "trained") == rows_without(dicts(by_task.rows), "trained")
    assert (board.notes, board.suites) == (notes_on(records, board.judged), ["quick, version 3"])
    for n, task in enumerate(("theory", "spurious")):
        suite = {"name": task, "version": 1, "settings": [str(k) * 64 for k in range(n)]}
        store.Store(tmp_path).keep("suites", suite | {"main_task": task, "sample_complexity": task})
    attributes = read(tmp_path).attrs
    assert (attributes[MAIN], attributes[SUCCESS]) == (["spurious", "theory"], "spurious")  # the larger one first


def test_records_have_the_parts_of_their_labels(tmp_path: Path) -> None:
    part = Part(name="far", params={"layers": [3, 6], "power": 2.5, "mode": "a, power=1", "on": False})
    budget = Budget(macs=0.35, blocks=(1, 2), convention="compound-ceil", schedule="every")
    one = first_record(task="theory", status="ok")
    cell = one.cell.model_copy(update={"strategy": part, "budget": budget, "where": "train", "track": "scratch"})
    changed = {"cell": cell, "cell_id": cell.id, "label": "far(layers=[3, 6], on=False)"}
    (row,) = dicts(read(filled(tmp_path, one.model_copy(update=changed))))
    assert (row["strategy"], row["strategy_name"]) == ("far(layers=[3, 6], on=False)", "far")
    assert json.loads(row["strategy_params"]) == {"layers": [3, 6], "on": False}
    parts = [row[f"budget_{name}"] for name in ("amount", "value", "rounding", "places", "where")]
    assert parts == ["macs", "0.35", "compound-ceil", "@1,2 every block", "train"]
    assert row["budget"] == "macs 0.35 compound-ceil @1,2 every block, in training only" and "cell" not in row


def test_a_folder_named_like_shipped_pictures_stays_apart(tmp_path: Path) -> None:
    """A folder that is called as shipped pictures are stays apart from them."""
    name = "folder-0123456789ab"
    shipped = first_record(task="composite", status="ok")
    task = shipped.cell.task.model_copy(update={"params": shipped.cell.task.params | {"images": name}})
    cell = shipped.cell.model_copy(update={"task": task})
    writer = store.Writer(tmp_path)
    for one in (shipped, shipped.model_copy(update={"cell": cell, "cell_id": cell.id})):
        writer.append(one)
    writer.close()
    store.Store(tmp_path).keep(manifests.FILES, manifests.FileEntry(name=name, file="digits").model_dump(mode="json"))
    settings = set(read(tmp_path)["setting"].astype(str))
    assert len(settings) == 2 and any(f"digits ({name})" in text for text in settings)
    assert len(gather(tmp_path).by_task.rows) == 2


def test_parameters_that_are_no_numbers_leave_a_board_without_pixels() -> None:
    setting = '[{"name":"t","params":{"canvas":"x"}},{"name":"vit","params":{"patch":0}}]'
    (setting_without_pixels,) = comparisons_of(frame_of([record("dense", setting=setting)]))
    assert "pixels" not in about(setting_without_pixels)
