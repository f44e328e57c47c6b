"""Who submits: what is stored, asked for and refused, and what readers of hostile text see."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import forge
import pytest
from commands import call

from sparsebench.publish.about import About
from sparsebench.publish.submission import MANIFEST, manifest_of, share_author, submit, verify

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


def submission_in(to: Path) -> Path:
    (manifest,) = to.glob(f"*/*/{MANIFEST}")
    return manifest.parent


def test_options_come_before_the_file_and_what_was_run_says_the_date(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("submission.toml").write_text(
        'authors = ["Zoë Ünal", "Bo Li"]\naffiliation = "Lab"\nlicence = "MIT"\npaper = "https://a.example/1"\n'
    )
    made = call("submit", out, "--to", "to", "--paper", "https://b.example/2?x=1#3", "--note", "one <b>line</b>")
    assert made.exit_code == 0, made.output
    folder = submission_in(tmp_path / "to")
    about = manifest_of(folder).about
    assert (about.authors, about.affiliation, about.licence) == (("Zoë Ünal", "Bo Li"), "Lab", "MIT")
    assert (about.paper, about.code, about.note) == ("https://b.example/2?x=1#3", "", "one <b>line</b>")
    days = {record.started[:10] for record in forge.folders.read_records(folder) if record.label == "norm"}
    assert manifest_of(folder).date == max(days) and manifest_of(folder).sparsebench
    assert verify(folder, placed=True).badge == "reported"


def test_a_manifest_that_says_nothing_of_this_stays_valid(sound: Path, tmp_path: Path) -> None:
    folder = forge.changed(sound, tmp_path, lambda raw: None)
    content = json.loads((folder / MANIFEST).read_bytes())
    for name in ("about", "date", "sparsebench", "replaces"):
        content.pop(name, None)
    (folder / MANIFEST).write_text(json.dumps(content))
    assert verify(folder, placed=True).badge == "reported"
    assert manifest_of(folder).about.authors == ()


WRONG: dict[str, list[str]] = {
    "a script as address": ["--paper", "javascript:alert(1)"],
    "a user before the host": ["--code", "https://good.example@bad.example/"],
    "markup in an address": ["--paper", "https://a.example/](x)"],
    "a quote in an address": ["--paper", 'https://a.example/"onclick='],
    "a long address": ["--code", "https://a.example/" + "a" * 400],
    "a long name": ["--author", "a" * 101],
    "many names": [word for k in range(51) for word in ("--author", f"a{k}")],
    "an empty name": ["--author", "  "],
    "a line break": ["--note", "a\nb"],
    "an escape code": ["--affiliation", "\x1b[2J"],
    "a character without width": ["--author", "Ada\u200bExample"],
    "a name that nobody sees": ["--author", "\u3164\u2800"],
    "marks that cover other lines": ["--note", "Z" + "\u0335\u0322\u033d" * 9],
    "marks of a writing that has many": ["--note", "\u0e01" + "\u0e47" * 9],
    "marks that enclose a letter": ["--note", "a" + "\u20dd" * 9],
    "a mark that turns the writing": ["--author", "a\u202eb"],
    "markup as licence": ["--licence", "<b>MIT</b>"],
    "a submission that is not there": ["--replaces", "tiny-3-0"],
    "a way out of the folder": ["--replaces", "../norm"],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_plain_is_refused_in_one_line(out: Path, tmp_path: Path, name: str) -> None:
    made = call("submit", out, "--to", tmp_path / "to", *WRONG[name])
    assert made.exit_code == 2 and made.stderr.startswith("Error: ") and made.stderr.count("\n") == 1
    assert made.stderr.isprintable() or made.stderr[:-1].isprintable()
    assert not list(tmp_path.rglob(MANIFEST))


@pytest.mark.parametrize(
    ("name", "other", "is_same"),
    [
        ("Bo", "\U0001d401o", True),  # a bold B
        ("Bo Li", "bo  LI.", True),
        ("Stra\u00dfe", "STRASSE", True),
        ("A\ufe0fda", "Ada", True),
        ("\u0930\u093e\u092e", "\u0930\u092e\u093e", False),  # they differ in the place of a vowel
        ("\u0e2a\u0e21", "\u0e2a\u0e34\u0e21", False),
    ],
)
def test_authors_are_the_same_by_what_is_seen_of_their_names(name: str, other: str, is_same: bool) -> None:
    assert share_author(About(authors=(name,)), About(authors=("Ada Ex", other))) == is_same


FILES = {
    "no TOML": "authors = [",
    "a field that does not exist": 'autor = "A"',
    "a number": "note = 3",
    "a text of two lines": 'note = """a\nb"""',
    "a line break as an escape": 'authors = ["A\\u2028B"]',
    "a table of authors": 'authors = [{name = "A"}]',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_wrong_is_named(out: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "who.toml"
    path.write_text(FILES[name])
    made = call("submit", out, "--to", tmp_path / "to", "--about", path)
    assert made.exit_code == 2 and "who.toml" in made.stderr and made.stderr.count("\n") == 1
    assert not list(tmp_path.rglob(MANIFEST))


@pytest.mark.parametrize(
    "about",
    [{"authors": ["\x1b[2J"]}, {"paper": "data:text/html,x"}, {"note": "x" * 501}, {"authors": "A"}, {"name": "A"}, []],
    ids=str,
)
def test_a_manifest_with_what_submit_refuses_is_rejected(sound: Path, tmp_path: Path, about: Any) -> None:
    folder = forge.changed(sound, tmp_path, lambda raw: None)
    content = json.loads((folder / MANIFEST).read_bytes()) | {"about": about}
    (folder / MANIFEST).write_text(json.dumps(content))
    verdict = verify(folder)
    assert verdict.badge == "rejected" and all(line.isprintable() for line in verdict.why)


@pytest.mark.integration
def test_a_terminal_is_asked_and_asked_again(out: Path, tmp_path: Path) -> None:
    """The command runs in a pseudo-terminal, whose other end answers."""
    answers = ["Ada L.; Bo", "", "nowhere", "https://p.example/1", "", "MIT", "a note"]
    ours, theirs = pty.openpty()
    os.write(ours, "".join(f"{answer}\n" for answer in answers).encode())
    command = [sys.executable, "-m", "sparsebench", "submit", str(out), "--to", str(tmp_path / "to")]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    about = manifest_of(submission_in(tmp_path / "to")).about
    assert (about.authors, about.affiliation, about.paper) == (("Ada L.", "Bo"), "", "https://p.example/1")
    assert (about.code, about.licence, about.note) == ("", "MIT", "a note")


def test_an_author_is_part_of_the_folder_so_that_groups_do_not_meet(out: Path, tmp_path: Path) -> None:
    folders = set()
    for name in ("Ada One", "Bo Two", "Zoë Ünal / 2", "李小龙", "王芳", "../x"):
        verdict = submit(out, tmp_path, about=About(authors=(name,)))
        folders.add(verdict.folder)
        assert verify(Path(verdict.folder), placed=True).badge == "reported"
        assert Path(verdict.folder).name.isascii() and Path(verdict.folder).parent == tmp_path / "norm"
    assert len(folders) == 6
