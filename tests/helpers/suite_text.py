"""The text of a suite file."""


def suite_text(
    *tasks: str, baselines: str = '"dense"', seeds: int = 1, budget: str = "macs = 0.5", more: str = ""
) -> str:
    """Return the text of a suite; `tasks` are the lines of each task."""
    head = f'name = "own"\nversion = 1\ntitle = "own"\nbaselines = [{baselines}]\nseeds = {seeds}\n{more}\n'
    return f"{head}[budget]\n{budget}\n" + "".join(f"\n[[task]]\n{task}\n" for task in tasks)
