"""Training of a model from a store and its splits, into a run folder."""
