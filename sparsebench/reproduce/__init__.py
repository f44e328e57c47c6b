"""The figures of published papers, made again: what to run is a suite, what comes out is figures and verdicts."""
