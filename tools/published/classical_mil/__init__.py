"""A recipe of published results."""
