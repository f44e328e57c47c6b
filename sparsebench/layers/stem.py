"""Patches made by a few convolutions in place of one projection (Xiao et al. 2021, "Early convolutions help
transformers see better"): a small Vision Transformer then learns from far fewer images.
"""

from __future__ import annotations

import itertools
from typing import Any

from timm.layers import PatchEmbed
from torch import nn

from sparsebench.layers.widths import stem_widths


class ConvStem(PatchEmbed):
    """3x3 convolutions of stride 2, each with batch normalisation and a GELU, then one of 1x1.

    A token sees less than one patch beyond its own. The arguments are those of timm's PatchEmbed, which has the rest.
    """

    proj: Any

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        dim, layers = self.proj.out_channels, []
        for C, wider in itertools.pairwise(stem_widths(dim, self.patch_size[0])):
            layers += [nn.Conv2d(C, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.GELU()]
        self.proj = nn.Sequential(*layers, nn.Conv2d(dim, dim, 1))

    def macs(self) -> int:
        """Return the MACs of its convolutions that a patch has a share of; normalisation is not counted."""
        total, places = 0, self.patch_size[0] ** 2
        for layer in self.proj:
            if isinstance(layer, nn.Conv2d):
                places //= layer.stride[0] ** 2
                total += places * layer.weight.numel()
        return total
