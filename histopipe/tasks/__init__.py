"""Kinds of prediction: their targets, aggregation, metrics and thresholds. Pure: neither files nor TensorFlow."""
