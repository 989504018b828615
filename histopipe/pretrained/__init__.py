"""Encoders: presets of pathology foundation models, and their published weights. No TensorFlow is imported."""
