"""A browser for pages of boards, which reports errors, and a published board."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from published_boards import write_board

from sparsebench.board import published
from sparsebench.board.board import Board
from sparsebench.board.published import page as render

CHROMIUM = os.environ.get("SPARSEBENCH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
WIDE = {"width": 1280, "height": 720}


@pytest.fixture(scope="module")
def published_board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a published board; do not write to it."""
    folder = tmp_path_factory.mktemp("boards") / "one"
    write_board(folder)
    published.write(published.board_files(folder))
    return folder


@pytest.fixture
def board(published_board: Path, tmp_path: Path) -> Path:
    """Return a copy of a published board, in a folder with other files."""
    (tmp_path / "boards" / "figures").mkdir(parents=True)
    return Path(shutil.copytree(published_board, tmp_path / "boards" / "one"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start a real browser, once."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'sparsebench[test]'")
    if CHROMIUM is None:
        pytest.skip("no browser: install chromium, or name one in SPARSEBENCH_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tabs(chromium: Any) -> list[Any]:
    """Return tabs that tests share, as opening a tab takes longer than most tests."""
    contexts = [chromium.new_context(permissions=["clipboard-read", "clipboard-write"]) for _ in range(2)]
    for context in contexts:
        context.set_default_timeout(10_000)
    return [context.new_page() for context in contexts]


@pytest.fixture
def opened(tabs: list[Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a board's page; fail on errors, dialogs and requests to other addresses."""
    wrong: list[str] = []
    free, path = iter(tabs), tmp_path / "leaderboard.html"
    listeners: dict[str, Callable[[Any], Any]] = {
        "console": lambda message: wrong.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: wrong.append(str(error)),
        "dialog": lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        "request": lambda request: _is_own(request.url, path) or wrong.append(f"request: {request.url}"),
    }

    def open_(board: Board, state: str = "", viewport: Any = WIDE, color_scheme: str = "light", title: str = "") -> Any:
        path.write_bytes(render(board, title=title))
        shown = next(free)
        shown.set_viewport_size(viewport)
        shown.emulate_media(color_scheme=color_scheme)
        shown.mouse.move(0, 0)
        for event, listener in listeners.items():
            shown.on(event, listener)
        shown.goto(path.as_uri() + state)
        shown.wait_for_selector("html[data-ready]")
        return shown

    yield open_
    for tab in tabs[: len(tabs) - len(list(free))]:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        tab.goto("about:blank")
    assert not wrong


def _is_own(url: str, path: Path) -> bool:
    return url.startswith("data:") or url.split("#")[0] == path.as_uri()
