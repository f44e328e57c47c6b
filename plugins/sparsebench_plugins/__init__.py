"""The strategies that come with sparsebench, one file each, found by entry points like those of any plugin."""
