"""What a strategy must leave as it is, besides the state of the process: torch's functions, the model, the output."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import timm.models.vision_transformer  # noqa: F401  # this and run_cell: what is to be watched must be there
from torch import nn

import sparsebench.cells.run_cell  # noqa: F401
from sparsebench.contain.process_state import FUNCTIONS, changes
from sparsebench.training.fit import state_digest

_FIRST = FUNCTIONS.get()


def replaced_functions() -> list[str]:
    """Return the functions that are other objects than when this module was imported, or that are gone."""
    return changes({FUNCTIONS.name: _FIRST})


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return what is to be compared of a model: its weights' hash, and each part's own attributes and hooks."""
    parts: dict[str, Any] = {"weights": state_digest(module.state_dict())}
    for name, part in module.named_modules():
        attributes = {key: _mark(key, value) for key, value in vars(part).items()}
        parts[f"attributes, hooks or forward of '{name}'"] = (id(part), type(part), type(part).forward, attributes)
    parts["requires_grad"] = {name: p.requires_grad for name, p in module.named_parameters()}
    return parts


def _mark(key: str, value: Any) -> Any:
    if "hooks" in key:
        return None if value is None else len(value)
    return value if isinstance(value, bool | int | float | str | tuple) else id(value) if callable(value) else ""


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names under which two of these differ."""
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


@contextmanager
def capture() -> Iterator[list[str]]:
    """Catch what is written to standard output and standard error, by Python or by the process; give it as one text."""
    texts: list[str] = []
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile("w+b"))
        stack.callback(lambda: texts.append(_content(file)))
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            kept = os.dup(descriptor)
            os.dup2(file.fileno(), descriptor)
            stack.callback(_put_back, kept, descriptor)
        text = stack.enter_context(open(os.dup(file.fileno()), "w", encoding="utf-8", errors="replace"))
        stack.enter_context(redirect_stdout(text))
        stack.enter_context(redirect_stderr(text))
        yield texts


def _put_back(kept: int, descriptor: int) -> None:
    os.dup2(kept, descriptor)
    os.close(kept)


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))
