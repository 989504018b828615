"""Cross-validation, search and comparison of trainings. Each training runs in a separate process."""
