"""Files of trained weights: which ones a user means, each of them a network, and what they are called."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebench.errors import UserError
from sparsebench.text import as_utf8, few

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
SUFFIXES = (SUFFIX, ".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
MOST_HEADER = 2**22
"""Bytes that say which weights there are: some 40,000 of them, of which networks have a thousand."""
CONVERT = (
    "convert it once, where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
    f"'weights{SUFFIX}')"
)


def locate_all(given: Sequence[Path], key: str = "") -> dict[str, Path]:
    """Return where the files of weights lie that a user means, by the names that cells have for them; see `files_of`.

    Files with the same weights are one network. What is done to weights, and to files, is said in a line.

    Args:
        given: files, folders and patterns.
        key: of the state dict in each file, see `weight_files.read_weights`.

    Raises:
        UserError: there are no such files, or one is damaged or holds no weights.
    """
    from sparsebench.layers.weight_files import read_weights

    located: dict[str, Path] = {}
    by_numbers: dict[str, Path] = {}
    said: defaultdict[str, list[Path]] = defaultdict(list)
    files = files_of(given)
    for path in files:
        name, path = locate(path)
        weights = read_weights(path, key)
        first = located.get(name)
        if first is None and len(files) > 1:
            first = by_numbers.setdefault(_digest(weights.state), path)
        if first not in (None, path):
            said[f"holds the same weights as {first}: they are one network"].append(path)
            continue
        located[name] = path
        if weights.others and not key:
            others = ", ".join(weights.others)
            said[f"'{weights.key}' is taken, and not {others}; --weights-key takes another"].append(path)
        for kind in sorted({str(value.dtype) for value in weights.state.values() if value.is_floating_point()}):
            if kind != "torch.float32":
                said[f"{kind.removeprefix('torch.')} becomes float32"].append(path)
    for line, paths in said.items():
        log.warning("--weights %s: %s", few([str(path) for path in paths]), line)
    return located


def files_of(given: Sequence[Path]) -> list[Path]:
    """Return files that are given, those of weights in a folder that is given, and those that a pattern matches.

    What else a folder holds or a pattern matches is left out, and said.

    Raises:
        UserError: a folder cannot be read or holds no weights, or a pattern matches none.
    """
    found = []
    for path in (one.expanduser() for one in given):
        try:
            folder = path.is_dir()
            if not folder and (os.path.lexists(path) or not glob.has_magic(str(path))):
                found.append(path)
                continue
            every = sorted(path.iterdir() if folder else map(Path, glob.glob(str(path), recursive=True)))
            chosen = [one for one in every if one.name.lower().endswith(SUFFIXES) and one.is_file()]
        except OSError as error:
            raise UserError(f"--weights: {path} cannot be read: {error.strerror or error}") from error
        left = [one.name for one in every if one not in chosen and not one.name.startswith(".")]
        if not chosen:
            raise UserError(
                f"--weights: {path} {'holds' if folder else 'matches'} no file of weights",
                got=few(left) or "nothing", allowed=", ".join(SUFFIXES),
            )  # fmt: skip
        if left:
            log.warning("--weights %s: %d files are taken, and left out: %s", path, len(chosen), few(left))
        found += chosen
    return found


def locate(path: Path) -> tuple[str, Path]:
    """Return the name that a cell has for a file of weights, from its content, and where it lies.

    Raises:
        UserError: there is no such file, it is of another kind, or it is truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    from sparsebench.layers.weight_files import content_name

    path = path.expanduser()
    if not path.name.lower().endswith(SUFFIXES):
        raise UserError(
            "--weights reads safetensors, and checkpoints of torch.save that hold weights alone",
            got=str(path), allowed=", ".join(SUFFIXES), next_step=CONVERT,
        )  # fmt: skip
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"--weights: {path} is no plain file")
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little") if path.suffix.lower() == SUFFIX else 0
            if MOST_HEADER < header < path.stat().st_size:
                raise UserError(f"--weights: {path} lists too much", got=f"{header} bytes", allowed=f"{MOST_HEADER}")
        name = content_name(path)
        if path.suffix.lower() != SUFFIX:
            return name, path
        with safe_open(path, framework="numpy") as weights:
            names = weights.keys()
    except OSError as error:
        raise UserError(f"--weights: {path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"--weights: {path} is truncated or no safetensors file ({error})") from error
    if not names:
        raise UserError(f"--weights: {path} holds no weights")
    return name, path


def file_names(located: Mapping[str, Path]) -> dict[str, str]:
    """Return by the names that cells have what people call located weights: the file's name.

    Where two are alike, all have as many of their folders' names before them as tell them apart.
    """
    parts = {name: path.absolute().parts for name, path in located.items() if name.startswith("weights-")}
    length, most = 1, max(map(len, parts.values()), default=0)
    while length < most and len({each[-length:] for each in parts.values()}) < len(parts):
        length += 1
    return {name: as_utf8("/".join(each[-length:])) for name, each in parts.items()}


def _digest(state: Mapping[str, Tensor]) -> str:
    """Return a hash of the weights themselves, whatever file they are in and by whatever names."""
    import torch

    digests = []
    for value in state.values():
        content = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
        content.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests.append(content.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
