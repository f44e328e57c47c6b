"""Plugins: hooks, discovery, the content of plugin files, and observers."""
