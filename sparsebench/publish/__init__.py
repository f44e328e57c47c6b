"""Submissions: publishing the records of a run, verifying them without torch, and running their cells again."""
