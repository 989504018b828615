"""From a store and its splits to a trained model in a run folder."""
