"""Training: the plain loop."""
