"""What is to be run: suites, requests, cells, their order and their files. Builds no network."""
