"""Maintenance of stores: info, verify, repair, merge, remove, compact, split."""
