"""What tests of submissions share: ways to forge them."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsebench.publish.folder import MANIFEST
from sparsebench.records.cell import canonical
from sparsebench.records.record import pack, unpack, unpack_reals

PLUGIN = Path(__file__).resolve().parents[1] / "plugins" / "good.py"
Raw = dict[str, Any]
Tamper = Callable[..., Path]


def sealed(folder: Path) -> Path:
    """Make the hashes of a manifest anew, as a forger would."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"] = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.json*"))
        if path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(canonical(manifest) + "\n")
    return folder


def flip(name: str, item: int = 0, bit: int = 0) -> Callable[[Raw], None]:
    """Return what flips one bit of one item's outcome."""

    def change(raw: Raw) -> None:
        n, text = raw["outcomes"]["n"], raw["outcomes"][name]
        if name == "loss":
            bits = unpack_reals(text, n).copy().view("<u4")
            bits[item] ^= 1 << bit
            raw["outcomes"][name] = base64.b64encode(zlib.compress(bits.tobytes(), 9)).decode()
            return
        numbers = unpack(text, n).copy()
        numbers[item] ^= 1 << bit
        raw["outcomes"][name] = pack(numbers)

    return change


def put(value: Any, *path: Any) -> Callable[[Raw], None]:
    """Return what puts a value at a path of a raw record."""

    def change(raw: Raw) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change
