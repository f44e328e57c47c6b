"""Submissions: publishing the records of a run, verifying them without torch, and running their cells again."""

MANIFEST = "manifest.json"
"""The file that makes a folder a submission; see `verify`."""
