"""Features of every patch of a store, by a trained network: computed once, kept as files."""
