"""Intervals, comparisons and ranks, as functions of numbers."""
