"""The strategies that come with sparsebench, each in a file of its own, found through entry points like any other."""
