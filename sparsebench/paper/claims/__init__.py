"""Published numbers of token reduction: which there are, what they come to when recounted, and whether they hold."""
