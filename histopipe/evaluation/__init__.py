"""Evaluate predictions of patches, slides and patients. Pure functions: arrays in, frozen dataclasses out."""
