"""How figures of a published paper are made again: what is run is a suite, what comes out is figures and verdicts."""
