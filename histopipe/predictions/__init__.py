"""Predictions of runs, folds and new slides: their files, and one reader for reports and viewer."""
