"""Strangers' code in processes and threads that end with it. Knows no cells."""
