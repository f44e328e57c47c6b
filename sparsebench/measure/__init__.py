"""What is measured: MACs and token counts, metrics, scores of test items, the quality of a selection."""
