import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparsebench.publish.replay import enclose, has_sandbox, no_network
from sparsebench.runner import process
from sparsebench.runner.devices import variables


def output(command: list[str]) -> str:
    """Return what a command prints that is started as workers' server is."""
    assert command[0] == sys.executable
    done = subprocess.run([*process.python_command(), *command[1:]], env=variables(), capture_output=True, text=True)
    return done.stdout + done.stderr


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
    with socket.create_server(("127.0.0.1", 0)) as server, enclose():
        code = CODE.replace("PORT", str(server.getsockname()[1]))
        said = output([sys.executable, "-c", code])
    assert "A_TOKEN" not in said and "SSH_AUTH_SOCK" not in said and "PATH" in said, said
    assert ("no network" in said) == bool(has_sandbox() or no_network()), said
    assert os.environ["A_TOKEN"] == "secret" and process.python_command() == (sys.executable,)


FILES = """
import os, sys
from pathlib import Path
home, mine, own = (Path(name) for name in sys.argv[1:4])
said = [(home / "secret").exists(), mine.read_text(), Path(mine.name).read_text(), os.listdir()]
for place in (home, mine.parent, Path("/etc"), Path("/var/tmp")):
    try:
        (place / "written-by-a-stranger").write_text("x")
    except OSError:
        pass
own.write_text("x")
outside = [name for name in os.listdir("/proc") if name.isdigit() and "FROM_OUTSIDE" in
           Path("/proc", name, "cmdline").read_text().split("\\0")]
print(said, outside, file=sys.stderr)
"""


@pytest.mark.skipif(not has_sandbox(), reason="bwrap is not there, or may not hide files here")
def test_strangers_see_no_home_and_write_to_temporary_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    for place in (home, shared):
        place.mkdir()
    (home / "secret").write_text("secret")
    (shared / "mine.py").write_text("mine")
    (shared / "other").write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(shared)  # names of files may be relative
    with enclose([shared / "mine.py"]):
        own = Path(tempfile.mkdtemp()) / "result"
        command = [sys.executable, "-c", FILES, str(home), str(shared / "mine.py"), str(own)]
        said = output(command)
        assert own.read_text() == "x", said
    assert said == "[False, 'mine', 'mine', ['mine.py']] []\n"
    assert [p.name for p in tmp_path.rglob("written*")] == [] and not Path("/etc/written-by-a-stranger").exists()
    assert not own.exists() and not Path("/var/tmp/written-by-a-stranger").exists()
