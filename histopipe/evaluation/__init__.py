"""Evaluate predictions of patches, slides and patients. Pure functions of arrays that return frozen dataclasses."""
