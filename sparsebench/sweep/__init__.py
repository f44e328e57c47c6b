"""From a suite to records: cells, the store, the engines."""
