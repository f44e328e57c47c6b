"""One cell: its data, its network, its training, its test and its results."""
