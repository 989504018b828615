"""Feature files, and bags of them for multiple-instance learning."""

from __future__ import annotations

from typing import Literal

BagOf = Literal["slide", "patient"]
"""What a bag holds the patches of. Here, because settings use it and must load without h5py."""
