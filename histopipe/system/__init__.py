"""What is not about slides: files, locks, worker processes, progress, loading TensorFlow."""
