"""The verdicts on figures, as words, for tests of papers."""

from sparsebench.paper import Result

YES, PARTLY, NO, OPEN = "reproduced", "partly", "not reproduced", "undecided"


def words(result: Result) -> list[str]:
    """Return the word of each verdict."""
    return [verdict.verdict for verdict in result.verdicts]
