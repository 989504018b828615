"""Annotations: read outlines from files of QuPath, ASAP and ImageScope, and label patches from them."""
