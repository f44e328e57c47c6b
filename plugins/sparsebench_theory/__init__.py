"""Four theories of token sparsification: their tasks, models, trainers, suites and papers, each in a folder."""
