"""How fast a strategy makes a network, beside the dense network, eager and compiled."""
