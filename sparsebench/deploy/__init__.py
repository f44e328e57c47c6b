"""Strategies on a user's network: apply, training, export, speed; pictures and comparisons of kept tokens."""
