"""Files of trained weights, read without running what is in them."""

from __future__ import annotations

import pickle
from pathlib import Path

from safetensors.torch import load_file
from timm.models import load_state_dict
from torch import Tensor

from sparsebench.errors import UserError, one_line


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a file by name: of safetensors, or of a checkpoint of torch.save.

    A checkpoint is read with weights_only=True, so that no program in it runs. Of one that holds more than weights
    those under `state_dict` or `model` are taken.

    Raises:
        UserError: a checkpoint that holds anything but numbers, or is damaged.
    """
    if path.suffix.lower() == ".safetensors":
        return load_file(path)
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path.name} is no checkpoint of weights alone", got=one_line(error)[:200],
            next_step="save model.state_dict() alone, with safetensors.torch.save_file or torch.save",
        ) from error  # fmt: skip
    if strange := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{path.name} is no checkpoint of weights alone", got=", ".join(map(str, strange[:3])))
    return dict(state)
