"""Measurements: MACs and token counts, metrics, outcomes of test items, quality of a selection."""
