"""Plans that fuse, merge or mix tokens, which networks with tokens of their own kinds refuse."""

import torch

from sparsebench.strategy.plans import Keep, Merge, Mix


def merge(view, keep):
    return Merge(torch.arange(view.index.shape[1]).expand(view.index.shape) % keep)


def mix(view, keep):
    B, N = view.index.shape
    return Mix(torch.rand(B, keep, N))


def fuse(view, keep):
    B, N = view.index.shape
    return Keep(torch.arange(keep - 1).expand(B, keep - 1), fuse=torch.rand(B, N))


FUSING = {"merge": merge, "mix": mix, "fuse": fuse}
