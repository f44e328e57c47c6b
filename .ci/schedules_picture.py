"""Draw docs/how-to/schedules.png: the tokens after each block with the schedules that schedule=auto compares."""

from __future__ import annotations

from pathlib import Path

from sparsebench.measure.cost import plain_vit_cost
from sparsebench.measure.schedule import candidates
from sparsebench.stats import style
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget

FILE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "schedules.png"
BUDGETS = (0.5, 0.3)


def main() -> None:
    """Draw the picture."""
    cost = plain_vit_cost(384, 12, 6, tokens=144, embed=3 * 14**2 * 384, classes=10)  # ViT-S/14 at 168 pixels
    traits = Traits("attention", ("class_attention",))
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
