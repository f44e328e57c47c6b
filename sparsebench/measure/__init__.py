"""What is measured: cost, timing, the quality of a selection, groups, sample complexity."""
