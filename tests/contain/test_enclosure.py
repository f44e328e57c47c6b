import os
import socket
import sys
from pathlib import Path

import pytest

from sparsebench.contain import enclosure
from sparsebench.contain.process import Worker
from sparsebench.engine.slots import slots

CODE = """
import os, socket, sys
try:
    socket.create_connection(("127.0.0.1", PORT), 5).close()
    said = "a network"
except OSError:
    said = "no network"
print(said, sorted(os.environ), file=sys.stderr)
"""


def test_strangers_have_neither_secrets_nor_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as server, enclosure.enclose():
        code = CODE.replace("PORT", str(server.getsockname()[1]))
        worker = Worker([sys.executable, "-c", code], slots("cpu", 1)[0].environment, tmp_path / "log")
        worker.end(60)
    said = (tmp_path / "log").read_text()
    assert "A_TOKEN" not in said and "SSH_AUTH_SOCK" not in said and "PATH" in said, said
    assert ("no network" in said) == bool(enclosure.no_network()), said
    assert os.environ["A_TOKEN"] == "secret" and enclosure.prefix() == ()
