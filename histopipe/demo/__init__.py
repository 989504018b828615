"""Slides that never were, to try everything on."""
