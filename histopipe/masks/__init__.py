"""Tissue masks as files: outlines and pictures that people can check, correct and replace."""
