"""Plans that fuse, merge or mix tokens, different tokens in each sample and block."""

import torch
from vits import any_tokens

from sparsebench.strategy.plans import Keep, Merge, Mix


def rng_of(view):
    return torch.Generator().manual_seed(9 + view.block)


def fuse(view, keep):
    return Keep(any_tokens(view, keep - 1).index, fuse=torch.rand(view.index.shape, generator=rng_of(view)))


def merge(view, keep):
    n, N = view.index.shape
    target = torch.randint(0, keep, (n, N), generator=rng_of(view))
    return Merge(target.scatter(1, torch.arange(keep).expand(n, keep), torch.arange(keep).expand(n, keep)))


def mix(view, keep):
    n, N = view.index.shape
    return Mix(torch.rand(n, keep, N, generator=rng_of(view)).softmax(dim=2))


FUSING = {"merge": merge, "mix": mix, "fuse": fuse}
