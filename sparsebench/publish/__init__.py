"""Publishing the records of a run, and verifying what others have published: from the records alone, without torch."""
