"""Intervals, comparisons and ranks: functions of numbers."""
