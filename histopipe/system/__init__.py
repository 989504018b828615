"""General functions that do not depend on slides: files, locks, worker processes, progress, loading TensorFlow."""
