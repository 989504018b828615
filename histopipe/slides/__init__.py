"""Whole-slide images: find and open them, and read their scale and pixels.

Only this package imports OpenSlide. Import names from its modules, so that finding slides does not load OpenSlide.
"""
