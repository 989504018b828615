"""Patches of stores as batches: selection, order, batches, `tf.data`, augmentation and stains."""
