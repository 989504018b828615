"""Predict slides with trained models: the command, models of patches and of bags, tables, and evaluation."""
