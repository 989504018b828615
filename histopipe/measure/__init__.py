"""Add data to a finished store: annotation labels, quality, stains."""
