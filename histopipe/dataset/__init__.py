"""Patches of stores as batches: selection, splits, order, batches, `tf.data`, augmentation and stains."""
