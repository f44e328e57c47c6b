"""A browser to open pages in, which reports what goes wrong."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsebench.board import picture
from sparsebench.board.board import Board
from sparsebench.board.published import page as render

CHROMIUM = os.environ.get("SPARSEBENCH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


DRAW = picture.draw


@pytest.fixture(scope="package", autouse=True)
def drawn() -> Iterator[None]:
    """Have pictures of boards drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture, "draw", DRAW)
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start a real browser, once."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'sparsebench[test]'")
    if CHROMIUM is None:
        pytest.skip("no browser: install chromium, or name one in SPARSEBENCH_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a board's page, and see that nothing goes wrong in it, or out of it."""
    wrong, contexts = [], []

    def open_(board: Board, state: str = "", **options: Any) -> Any:
        path = tmp_path / "leaderboard.html"
        path.write_bytes(render(board))
        contexts.append(context := chromium.new_context(**options))
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        shown = context.new_page()
        shown.set_default_timeout(10_000)
        shown.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        shown.on("request", lambda request: _is_own(request.url, path) or wrong.append(f"request: {request.url}"))
        shown.goto(path.as_uri() + state)
        shown.wait_for_selector("html[data-ready]")
        return shown

    yield open_
    for context in contexts:
        context.close()
    assert not wrong


def _is_own(url: str, path: Path) -> bool:
    return url.startswith("data:") or url.split("#")[0] == path.as_uri()
