"""Files with a strategy that does something besides choosing tokens."""

from pathlib import Path

STRATEGY = '''
import sparsebench
{before}

class Own(sparsebench.Strategy):
    """Keeps the tokens with the largest sums."""

    name = "{name}"

    def scores(self, view):
        {body}
        return view.tokens.sum(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Own]
'''


def write_strategy(path: Path, body: str = "pass", before: str = "") -> Path:
    """Write a strategy called as its file, whose choice begins with some lines; `before` comes before its class."""
    lines = body.strip("\n").replace("\n", "\n        ")
    path.write_text(STRATEGY.format(name=path.stem, before=before, body=lines))
    return path
