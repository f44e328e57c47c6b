"""The exceptions of sparsebench, and functions that make untrusted text safe to print."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from pydantic import ValidationError

LIMITS = {
    "RLIMIT_AS": "address space of a process {1:.2f} GB (`ulimit -v`)",
    "RLIMIT_NPROC": "a user's processes and threads {0} (`ulimit -u`)",
}
"""Limits of a process in words: with the number, and the number divided by 10^9."""
LONGEST_ADDRESS = 300
ADDRESS = re.compile(r"https?://[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*(:\d{1,5})?(/[A-Za-z0-9._~!$&*+,;=:@%/-]*)?"
                     r"(\?[A-Za-z0-9._~!$&*+,;=:@%/?-]*)?(#[A-Za-z0-9._~!$&*+,;=:@%/?-]*)?")  # fmt: skip
"""An address without quotes, brackets and spaces, which end addresses in Markdown, HTML and LaTeX."""

ENTRY = re.compile(r"(\w+)(?:\(((?:[^()]|\([^()]*\))*)\))?((?:,| by ).*)?", re.DOTALL)
"""The name of a strategy, its parameters, and what follows: a schedule, a budget or a group."""


class UserError(Exception):
    """An error in the input that the user can correct. The command line prints it as one line.

    Args:
        what: what is wrong.
        got: what was given.
        allowed: what is allowed.
        next_step: what to do now.

    Attributes:
        code: exit code of the command line: 2 for a wrong command, 1 for wrong data.
    """

    code: ClassVar[int] = 2

    def __init__(self, what: str, *, got: Any = None, allowed: Any = None, next_step: str | None = None):
        parts = [what]
        if got is not None:
            parts.append(f"got {got if isinstance(got, str) else repr(got)}")
        if allowed is not None:
            allowed = allowed if isinstance(allowed, str) else ", ".join(map(str, allowed))
            parts.append(f"allowed: {allowed}")
        if next_step is not None:
            parts.append(next_step)
        super().__init__("; ".join(plain(" ".join(part.split()), None) for part in parts))


def unknown(what: str, got: str, allowed: Iterable[str], *, meant: str | None = None) -> UserError:
    """Return the error for an unknown name. It suggests the name `meant`, or else the most similar allowed name."""
    allowed = sorted(allowed)
    near = [meant] if meant else difflib.get_close_matches(got, allowed, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else None
    return UserError(f"unknown {what}", got=f"'{got}'", allowed=few(allowed, 20) or "none", next_step=hint)


def reason_of(error: BaseException) -> str:
    """Return in one line why a file or a value cannot be read. Of pydantic's errors, only the first is included."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))  # empty if the whole text is no JSON
        text = f"{place}: {first['msg']}" if place else first["msg"]
    return plain(" ".join(text.split()), 300)


def text_of(error: BaseException) -> str:
    """Return the message of any error, in valid UTF-8. If str(error) raises, the text says so."""
    try:
        text = str(error)
    except BaseException as other:  # raised by third-party code
        text = f"(its text raises {type(other).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, after the error's type. A UserError's message has no type."""
    text = reason_of(error) if isinstance(error, ValidationError) else text_of(error)
    return text if isinstance(error, UserError) else " ".join(f"{type(error).__name__}: {text}".split())


def last_line(error: BaseException, is_own: Callable[[FrameType], bool]) -> str:
    """Return " (FILE:LINE)", the last line in the error's traceback whose frame is the user's own; "" without any."""
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_own(frame)
    ]
    return f" ({lines[-1]})" if lines else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory or address space is short. Libraries raise many types for this."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if isinstance(error, UserError):
        return False
    text = text_of(error)
    return any(words in text for words in ("allocate memory", "failed to map segment", "std::bad_alloc"))


def shortage(error: BaseException) -> str | None:
    """Return in one line what is short, memory or threads, with the limits of this process; None for other errors."""
    if is_out_of_memory(error):
        return f"not enough memory{_limits('RLIMIT_AS')}"
    no_process = isinstance(error, OSError) and error.errno == errno.EAGAIN
    text = "" if isinstance(error, UserError) else text_of(error)
    if no_process or "start new thread" in text or "launch worker thread" in text:
        return f"no more threads or processes{_limits('RLIMIT_AS', 'RLIMIT_NPROC')}"
    return None


def _limits(*names: str) -> str:
    """Return the limits of this process that hold, after a semicolon; "" if none holds."""
    texts = []
    for name in names:
        if (limit := limit_of(name)) is not None:
            texts.append(LIMITS[name].format(limit, limit / 1e9))
    return f"; limits that can be raised: {', '.join(texts)}" if texts else ""


def limit_of(name: str) -> int | None:
    """Return a limit of this process, or None if there is none."""
    with suppress(ImportError):  # Windows
        import resource

        limit = resource.getrlimit(getattr(resource, name))[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


class NotReadyError(UserError):
    """The initial weights of a cell are missing or damaged: the cell is skipped, and the same command runs it."""


class StrategyError(Exception):
    """A strategy broke its contract (wrong plan, NaN scores, a field it did not declare): the cell failed."""


class UnsupportedError(Exception):
    """A strategy cannot act on this model or task: the cell is unsupported, which is not a failure."""


class DivergedError(Exception):
    """A loss or a number of the network is NaN or infinite, mostly because training diverged: the cell failed."""


def as_utf8(text: str) -> str:
    """Return a text that can be encoded as UTF-8. Bytes that Python escaped as surrogates are decoded as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # a lone surrogate that escapes no byte
        return text.encode("utf-8", "replace").decode()


def few(names: Sequence[str], most: int = 3, width: int | None = None) -> str:
    """Return the first `most` names and the number of the others. With `width`, `plain` cuts each name to it."""
    shown = names[:most] if width is None else [plain(name, width) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def entry_names(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return names of strategies in which entries of one strategy have only the parameters that tell them apart.

    Returns:
        The shorter text of each name; and by strategy the parameters that its entries have in common, without those
        of a strategy with a single entry.
    """
    entries: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name in names:
        strategy, parameters, _ = _parts_of(name)
        entries[strategy][name] = parameters
    shorter: dict[str, str] = {}
    shared: dict[str, str] = {}
    for strategy, of_names in entries.items():
        lists = list(of_names.values())
        are_equal = all(parameters == lists[0] for parameters in lists)
        common = [] if are_equal else [one for one in lists[0] if all(one in parameters for parameters in lists)]
        if common:
            shared[strategy] = ", ".join(common)
        for name, parameters in of_names.items():
            left = ",".join(one for one in parameters if one not in common)
            rest = _parts_of(name)[2]
            shorter[name] = f"{strategy}({left}){rest}" if left else f"{strategy}{rest}"
    return shorter, shared


def _parts_of(name: str) -> tuple[str, list[str], str]:
    """Return the strategy in a name, its parameters, and what follows them."""
    match = ENTRY.fullmatch(name)
    if match is None:
        return name, [], ""
    parameters = re.split(r",(?![^(]*\))", match[2]) if match[2] else []
    return match[1], parameters, match[3] or ""


def short_names(names: Iterable[str], most: int) -> dict[str, str]:
    """Return a text of at most `most` characters for each name; different names have different texts.

    Entries of one strategy have only the parameters that tell them apart. A long name is cut at its end. Names that
    would then be alike keep their beginning and the part where they differ. If they are still alike, they are numbered.
    """
    texts, _ = entry_names(names)
    cut = _cut_names(texts.values(), most)
    return {name: cut[text] for name, text in texts.items()}


def _cut_names(names: Iterable[str], most: int) -> dict[str, str]:
    """Return a text of at most `most` characters for each name; different names have different texts."""
    short = {name: name if len(name) <= most else f"{name[: most - 1]}\u2026" for name in names}
    for alike in _alike(short):
        same = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*alike, strict=False)))
        short |= {name: _around(name, same, most) for name in alike}
    room = most - len(f" {len(short)}")
    numbers = Counter[str]()
    for name in (name for alike in _alike(short) for name in alike):
        begin = short[name][:room]
        numbers[begin] += 1
        short[name] = f"{begin} {numbers[begin]}"
    return short


def _alike(short: Mapping[str, str]) -> list[list[str]]:
    """Return the groups of names that have the same text."""
    groups = defaultdict[str, list[str]](list)
    for name, text in short.items():
        groups[text].append(name)
    return [group for group in groups.values() if len(group) > 1]


def _around(name: str, place: int, most: int) -> str:
    """Return the beginning of a name and the part from `place` on, in `most` characters."""
    begin = most // 2 - 1
    room = most - begin - 1
    start = max(begin, min(place, len(name) - room))
    end = name[start : start + room]
    if start + room < len(name):
        end = f"{end[:-1]}\u2026"
    return f"{name[:begin]}\u2026{end}"


def plain(text: object, most: int | None = 200) -> str:
    """Return a text as one line of at most `most` printable characters.

    Escape codes, carriage returns and marks that change the direction of writing are replaced.
    """
    shown = str(text)
    if most is not None:
        shown = shown[: most + 1]
    if not shown.isprintable():
        shown = as_utf8(shown)
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if most is None or len(shown) <= most else shown[: most - 3] + "..."


def is_address(text: str) -> bool:
    """Return whether a text is an address that may be a link on a board."""
    return len(text) <= LONGEST_ADDRESS and ADDRESS.fullmatch(text) is not None
