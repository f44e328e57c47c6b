"""Training and evaluation of networks, and `fit` of strategies."""
