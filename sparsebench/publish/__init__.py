"""Publishing the records of a run, and verifying what others have published: from the records alone, without torch."""

MANIFEST = "manifest.json"
"""The file by which a folder is a submission; see `verify`."""
