"""The least attended tokens rest for a block, and may return."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Rest, Site, Strategy, TokenView


class IdleViT(Strategy):
    """The tokens with the least class attention skip one block; the next block selects from all tokens again.

    Xu et al. (2023): some tokens take part in a block, and the idle ones are joined to what comes out of it. The score
    is the attention from the class token in the block before, mean over heads; without a class token the attention
    received. A token that was idle there keeps its score from the last block in which it took part; so that scores
    from blocks with more tokens and fewer compare, attention is taken times the number of tokens. From the first
    block of the budget on it acts in every block, and a count holds until the next: a block has as many tokens as if
    they had left for good. It cannot act in block 0, before which there is no attention.
    """

    name: ClassVar[str] = "idle_vit"
    site: ClassVar[Site] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"previous_attention"})
    how: ClassVar[How] = "rest"
    citation: ClassVar[str] = "Xu et al., No token left behind (IdleViT), AJCAI 2023, arXiv 2310.05654"
    bibtex: ClassVar[str] = """@inproceedings{xu2023idlevit,
  title = {No Token Left Behind: Efficient Vision Transformer via Dynamic Token Idling},
  author = {Xu, Xuwei and Li, Changlin and Chen, Yudong and Chang, Xiaojun and Liu, Jiajun and Wang, Sen},
  booktitle = {Australasian Joint Conference on Artificial Intelligence},
  year = {2023},
  url = {https://arxiv.org/abs/2310.05654}
}"""
    differs: ClassVar[str] = (
        "IdleViT is finetuned with a token cut loss on its attention maps, and here nothing is trained for it; the "
        "score of a token that was idle, and the blocks in which the counts fall, are choices made here"
    )

    def plan(self, view: TokenView, keep: int) -> Rest:
        """Let all rest but the most attended."""
        return Rest.all_but_top(view.previous_attention, keep)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [IdleViT]
