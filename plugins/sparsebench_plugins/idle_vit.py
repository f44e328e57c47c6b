"""The least attended tokens rest for a block, and may return."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Rest, Site, Strategy, TokenView


class IdleViT(Strategy):
    """The tokens with the least class attention skip one block; the next block selects from all tokens again.

    Xu et al. (2023): some tokens take part in a block, and the idle tokens are joined to its output. The score is the
    attention from the class token in the previous block, mean over heads; without a class token it is the received
    attention. A token that was idle in that block keeps its score from the last block in which it took part. Attention
    is multiplied by the number of tokens, so that scores from blocks with different token counts are comparable. The
    strategy acts in every block from the first block of the budget, and a count holds until the next count: a block has
    as many tokens as if the idle tokens were removed. It cannot act in block 0, because there is no previous attention.
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
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "IdleViT is fine-tuned with a token cut loss on its attention maps, while nothing is trained here; the score "
        "of an idle token, and the blocks in which the counts fall, are this project's choice"
    )

    def plan(self, view: TokenView, keep: int) -> Rest:
        """Let all tokens rest except the most attended."""
        return Rest.all_but_top(view.previous_attention, keep)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [IdleViT]
