"""Patches of one or several stores as batches: their order, their splits, their loader, their augmentation."""
