"""A strategy on a network of one's own: as a module that is called, trained and exported."""
