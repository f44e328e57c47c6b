"""Tasks: data whose relevant tokens are known, with labels and groups."""
