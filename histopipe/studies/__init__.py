"""Many trainings as one: cross-validation, search, comparison. Each training is a process of its own; no model is loaded here."""
