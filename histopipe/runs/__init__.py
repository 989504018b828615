"""Parts of a run that need no TensorFlow: settings, folder, result, and the training process."""
