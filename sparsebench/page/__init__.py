"""The leaderboard as one HTML file that needs nothing else."""

from sparsebench.page.page import render

__all__ = ["render"]
