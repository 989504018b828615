"""Apply networks to patches: encoders, `embed` and `predict`."""
