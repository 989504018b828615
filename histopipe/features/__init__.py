"""Feature files, and bags of them for multiple-instance learning."""

from __future__ import annotations

from typing import Literal

BagOf = Literal["slide", "patient"]
"""Unit of a bag. Defined here because the settings use it and must load without h5py."""
StoredType = Literal["float32", "float16"]
"""Type of the stored features. Defined here for the same reason."""
