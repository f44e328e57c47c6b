"""Brings nothing."""
