"""Files of trained weights: which one a user means. Only safetensors, as a pickle can run any program."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparsebench.errors import UserError

SUFFIX = ".safetensors"
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
    if path.suffix.lower() != SUFFIX:
        raise UserError(
            "--weights reads safetensors only: other formats are pickles, which can run any program when read",
            got=str(path), allowed=f"a {SUFFIX} file", next_step=CONVERT,
        )  # fmt: skip
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"--weights: {path} is no plain file")
        with path.open("rb") as file:
            if (header := int.from_bytes(file.read(8), "little")) > MOST_HEADER and header < path.stat().st_size:
                raise UserError(f"--weights: {path} lists too much", got=f"{header} bytes", allowed=f"{MOST_HEADER}")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with safe_open(path, framework="numpy") as weights:
            names = weights.keys()
    except OSError as error:
        raise UserError(f"--weights: {path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"--weights: {path} is truncated or no safetensors file ({error})") from error
    if not names:
        raise UserError(f"--weights: {path} holds no weights")
    return f"weights-{digest[:12]}", path
