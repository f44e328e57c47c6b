"""Write plugin files whose strategy does more than choose tokens, and installed distributions."""

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


def write_distribution(site: Path, entries: dict[str, str], *, name: str = "stranger", **modules: str) -> Path:
    """Write version 1.5 of a distribution, with entry points and modules, into a folder; return the folder."""
    info = site / "stranger-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + f"Name: {name}\nVersion: 1.5\n" * bool(name))
    lines = [f"{entry} = {module}" for entry, module in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[sparsebench]", *lines, ""]))
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text, encoding="utf-8")
    return site


def write_strategy(path: Path, body: str = "pass", before: str = "") -> Path:
    """Write a strategy with the name of its file. Its scores() begins with `body`; `before` precedes its class."""
    lines = body.strip("\n").replace("\n", "\n        ")
    path.write_text(STRATEGY.format(name=path.stem, before=before, body=lines))
    return path
