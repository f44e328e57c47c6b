"""How strategies, tasks and models come in: hooks, discovery, specifications on the command line."""
