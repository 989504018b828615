"""Synthetic slides, and the full pipeline on them."""
