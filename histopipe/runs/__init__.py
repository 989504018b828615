"""Everything about a run that needs no TensorFlow: settings, folder, result, the process that trains."""
