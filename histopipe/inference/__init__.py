"""Run the patches of slides through networks: encoders, and `embed`."""
