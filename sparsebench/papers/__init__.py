"""Papers whose figures are made again: how each is drawn of its trials, and what is claimed of it."""
