"""Keeping a store for years: verify, repair, merge, remove, compact, split."""
