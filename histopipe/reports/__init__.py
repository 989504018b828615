"""Heatmaps and HTML reports."""
