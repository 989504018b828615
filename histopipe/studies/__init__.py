"""Cross-validation, search and comparison of trainings. Each training is a separate process; no model is loaded here."""
