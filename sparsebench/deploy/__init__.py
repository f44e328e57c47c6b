"""Strategies on a user's network: apply, training, export."""
