"""On which devices cells run, and on how many workers."""

from __future__ import annotations

import os
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.planning.planner import Plan
from sparsebench.sources.cache import cores

MOST_WORKERS = 16


def workers_for(plan: Plan, device: str, asked: int | None, exclusive: bool = False) -> int:
    """Return how many worker processes a run has: as asked, or one a core, or one a GPU; 0 is this process.

    Raises:
        UserError: with `exclusive`, more than the one of this machine, or than one a GPU.
    """
    if asked == 0:
        return 0
    alone = gpus() if device == "cuda" else 1
    most = min(cores(), MOST_WORKERS) if device == "cpu" and not exclusive else alone
    if exclusive and asked is not None and asked > alone:
        one = "one cell at a time on each GPU" if device == "cuda" else "one cell at a time"
        raise UserError(f"--exclusive runs {one}", got=f"--jobs {asked}", allowed=f"0 to {alone}")
    return max(1, min(asked or most, len(plan.todo)))


def resolve_device(device: str) -> str:
    """Return "cpu", "cuda:i" for one GPU or "cuda" for several, for auto, cpu, cuda or cuda:i.

    Raises:
        UserError: another word, or a CUDA device that is not there.
    """
    if device == "cpu":
        return device
    kind, _, number = device.partition(":")
    if device != "auto" and (kind != "cuda" or (number and not (number.isascii() and number.isdigit()))):
        raise UserError("--device", got=f"'{device}'", allowed="auto, cpu, cuda, cuda:0, ...")
    if device == "auto" and not _has_nvidia():
        return "cpu"
    available = gpus()
    if device == "auto" and not available:
        return "cpu"
    if int(number or 0) >= available:
        raise UserError(
            f"--device {device}: torch sees {available} CUDA devices here", next_step="use --device cpu or auto"
        )
    return f"cuda:{number or 0}" if number or available == 1 else "cuda"


def gpus() -> int:
    """Return how many CUDA devices torch sees here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_nvidia() -> bool:
    """Say whether an NVIDIA driver is loaded, without the seconds that importing torch takes."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")) or os.name == "nt"
