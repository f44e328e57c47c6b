"""What a strategy does to a network: pictures and comparisons of kept tokens, and speeds."""
