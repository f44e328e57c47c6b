"""Random tokens stay in training, and all tokens in the test."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Keep, Kind, Published, Strategy, TokenView


class PatchDropout(Strategy):
    """Drops random tokens at the input in training (Liu et al. 2023); the test uses all tokens.

    It saves MACs in training: the budget limits a training step, while the record has the MACs of the test, which are
    dense. Its cells are marked "in training only"; they are those of `random` in training only. The paper's p = 0.5 is
    keep_rate=0.5: max(1, floor(N (1 - p))) of N tokens. Each step draws new tokens, except in tasks whose recipe fixes
    the selection.
    """

    name: ClassVar[str] = "patch_dropout"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset()
    trains_only: ClassVar[bool] = True
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Liu et al., PatchDropout, WACV 2023"
    bibtex: ClassVar[str] = """@inproceedings{liu2023patchdropout,
  title = {{PatchDropout}: Economizing Vision Transformers Using Patch Dropout},
  author = {Liu, Yue and Matsoukas, Christos and Strand, Fredrik and Azizpour, Hossein and Smith, Kevin},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year = {2023}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("patch_dropout:keep_rate=0.5", "ViT"),)

    def plan(self, view: TokenView, keep: int) -> Keep | None:
        """Keep uniformly random tokens, with one stream per sample; in the test keep all tokens."""
        return Keep.top(view.random(), keep) if view.training else None


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [PatchDropout]
