"""Draw docs/how-to/schedules.png: the tokens after each block with the schedules that schedule=auto compares."""

from __future__ import annotations

from pathlib import Path

from sparsebench.measure.cost import BlockCost, VitCost
from sparsebench.measure.schedule import candidates
from sparsebench.stats import style
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget

FILE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "schedules.png"
BUDGETS = (0.5, 0.3)


def vit_small() -> VitCost:
    """Return the cost model of a ViT-S/14 at 168 pixels."""
    C = 384
    block = BlockCost(qkv=3 * C * C, proj=C * C, mlp=8 * C * C, width=C)
    return VitCost(144, 1, 1, 3 * 14**2 * C, 10 * C, (block,) * 12, C, 6)


def main() -> None:
    """Draw the picture."""
    cost, traits = vit_small(), Traits("attention", ("class_attention",))
    figure = style.new(8.5, 3.2)
    panels = figure.subplots(1, len(BUDGETS), sharey=True)
    for panel, macs in zip(panels, BUDGETS, strict=True):
        for number, candidate in enumerate(candidates(Budget(macs=macs, schedule="auto"), traits, cost)):
            after = dict(zip(candidate.schedule.blocks, candidate.schedule.counts, strict=True))
            tokens = [cost.tokens]
            for block in range(cost.depth):
                tokens.append(after.get(block, tokens[-1]))
            round_, place = divmod(number, len(style.COLOURS))
            panel.step(
                range(-1, cost.depth),
                tokens,
                where="post",
                label=candidate.name,
                color=style.COLOURS[place],
                linestyle="--" if round_ else "-",
                linewidth=1.4,
            )
        panel.set_title(f"{macs:g} of the MACs", fontsize=10)
        panel.set_xlabel("block")
        panel.set_xticks(range(0, cost.depth, 2))
    panels[0].set_ylabel("tokens after the block")
    panels[-1].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    FILE.write_bytes(style.content(figure, "png"))


if __name__ == "__main__":
    main()
