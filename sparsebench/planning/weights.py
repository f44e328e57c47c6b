"""Files of trained weights: which one a user means. Only safetensors, as a pickle can run any program."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparsebench.errors import UserError

SUFFIX = ".safetensors"
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
        with path.open("rb") as file:
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
