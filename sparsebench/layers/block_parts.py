"""timm's blocks cut between attention and MLP."""

from __future__ import annotations

from typing import Any

from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block
from torch import Tensor

from sparsebench.errors import UnsupportedError

FORWARDS = (Block.forward, EvaBlock.forward, EvaBlockPostNorm.forward)


def check_block(block: Any) -> None:
    """Raise UnsupportedError for a block whose attention and MLP are not known one by one."""
    if type(block).forward not in FORWARDS:
        raise UnsupportedError(
            f"blocks of type {type(block).__name__} cannot be cut between attention and MLP; use a strategy of "
            "the input or block site"
        )


def attention_input(block: Any, x: Tensor) -> Tensor:
    """Return what a block's attention takes of the tokens that come to the block."""
    return x if isinstance(block, EvaBlockPostNorm) else block.norm1(x)


def attention_branch(block: Any, attended: Tensor) -> Tensor:
    """Return what a block adds to its tokens of what its attention gives."""
    if isinstance(block, EvaBlockPostNorm):
        return block.drop_path1(block.norm1(attended))
    if isinstance(block, EvaBlock):
        return block.drop_path1(attended if block.gamma_1 is None else block.gamma_1 * attended)
    return block.drop_path1(block.ls1(attended))


def mlp_branch(block: Any, x: Tensor) -> Tensor:
    """Return what a block adds to its tokens after attention."""
    if isinstance(block, EvaBlockPostNorm):
        return block.drop_path2(block.norm2(block.mlp(x)))
    made = block.mlp(block.norm2(x))
    if isinstance(block, EvaBlock):
        return block.drop_path2(made if block.gamma_2 is None else block.gamma_2 * made)
    return block.drop_path2(block.ls2(made))
