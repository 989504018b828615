"""Tissue masks as files: outlines and pictures that people can look at, correct and replace."""
