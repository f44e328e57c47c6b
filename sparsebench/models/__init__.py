"""Networks that a strategy can act on."""
