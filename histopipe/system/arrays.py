"""Names of array types that many modules use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
PixelArray = NDArray[np.uint8]
"""(H, W, 3) RGB pixels, 0 to 255."""
