"""Files of trained weights: which one a user means. Checkpoints of torch.save are read as weights alone, later."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparsebench.errors import UserError

SUFFIX = ".safetensors"
CHECKPOINTS = (".pth", ".pt", ".bin")
MOST_HEADER = 2**22
"""Bytes that say which weights there are: some 40,000 of them, of which networks have a thousand."""
CONVERT = (
    "convert it once, where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
    f"'weights{SUFFIX}')"
)


def locate(path: Path) -> tuple[str, Path]:
    """Return the name that a cell has for a file of weights, from its content, and where it lies.

    Raises:
        UserError: there is no such file, it is of another kind, or it is truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = path.expanduser()
    kind = path.suffix.lower()
    if kind not in (SUFFIX, *CHECKPOINTS):
        raise UserError(
            "--weights reads safetensors, and checkpoints of torch.save that hold weights alone",
            got=str(path), allowed=", ".join((SUFFIX, *CHECKPOINTS)), next_step=CONVERT,
        )  # fmt: skip
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"--weights: {path} is no plain file")
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little") if kind == SUFFIX else 0
            if MOST_HEADER < header < path.stat().st_size:
                raise UserError(f"--weights: {path} lists too much", got=f"{header} bytes", allowed=f"{MOST_HEADER}")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if kind in CHECKPOINTS:
            return f"weights-{digest[:12]}", path
        with safe_open(path, framework="numpy") as weights:
            names = weights.keys()
    except OSError as error:
        raise UserError(f"--weights: {path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"--weights: {path} is truncated or no safetensors file ({error})") from error
    if not names:
        raise UserError(f"--weights: {path} holds no weights")
    return f"weights-{digest[:12]}", path
