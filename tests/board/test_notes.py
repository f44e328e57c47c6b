"""What is said under a board is the same wherever its records were read from."""

import pandas as pd

from sparsebench.board.notes import cautions


def test_notes_do_not_hang_on_how_texts_are_stored() -> None:
    """What comes from a cache is categories, whose order is that in which they came."""
    texts = pd.DataFrame(
        [
            {"cell_id": f"{name}{asked}", "status": "ok", "task": "composite", "strategy": name, "kind": "deployable",
             "budget": f"macs {asked}", "macs_ratio": 0.37, "macs_ratio_asked": asked, "device": "cpu"}
            for name in "bca" for asked in (0.7, 0.4, 0.85)
        ]
    )  # fmt: skip
    categories = {name: pd.Categorical(texts[name], texts[name].unique()) for name in ("strategy", "budget", "task")}
    lines = cautions(texts)
    assert len(lines) == 9 and lines == sorted(lines) == cautions(texts.assign(**categories))
