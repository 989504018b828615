"""What a trained model says of new slides, patch by patch, and of slides and patients put together."""
