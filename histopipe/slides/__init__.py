"""Whole-slide images: finding them, opening them, their scale and their pixels.

Only this package imports OpenSlide. Its names are imported from its modules, so that finding slides loads no OpenSlide.
"""
