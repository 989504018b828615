"""Tissue masks: algorithms and networks that find tissue, and files that people can check, correct and replace."""
