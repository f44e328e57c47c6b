"""The tokens with the largest norm stay."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class FeatureNorm(Strategy):
    """Keeps the tokens with the largest norm ||x_j||_2 between attention and MLP; no canonical paper.

    The parameter `keep` selects the largest or the smallest norms. Large self-supervised networks have tokens with a
    large norm on background patches (Darcet et al. 2024); there the smallest should be kept.
    """

    name: ClassVar[str] = "feature_norm"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    citation: ClassVar[str] = "Darcet et al., Vision transformers need registers, ICLR 2024"
    bibtex: ClassVar[str] = """@inproceedings{darcet2024registers,
  title = {Vision Transformers Need Registers},
  author = {Darcet, Timoth{\\'e}e and Oquab, Maxime and Mairal, Julien and Bojanowski, Piotr},
  booktitle = {International Conference on Learning Representations},
  year = {2024}
}"""
    differs: ClassVar[str] = "only the existence of tokens with large norms is published, not the selection by norm"

    keep: Literal["largest", "smallest"] = "largest"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norm, negated if the smallest stay."""
        norm = view.tokens.norm(dim=2)
        return norm if self.keep == "largest" else -norm


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [FeatureNorm]
