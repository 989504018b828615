"""What prepares the server of the workers of an ingest. Nothing slow is imported before they start."""

from __future__ import annotations

import importlib


def prepare() -> None:
    """Import what the workers of an ingest need."""
    for name in ("ingestion.planning", "slides.tiff_tiles"):
        importlib.import_module(f"histopipe.{name}")
    importlib.import_module("cv2").setNumThreads(1)  # each worker has one core
