"""Observers: who else is told of each record that a run finishes."""
