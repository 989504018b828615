"""Columns that are added to a finished store: annotation labels, quality, stains."""
