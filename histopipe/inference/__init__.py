"""Patches through a network: encoders, `embed`, `predict`."""
