"""Features of patches in two dimensions, for a map."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import needs_extra

Projection = Literal["pca", "umap"]
_COMPONENTS, _NEIGHBOURS = 50, 15
"""Principal components of which UMAP makes its map, and neighbours of a patch there, which is umap-learn's default."""


def project(features: NDArray[np.floating], method: Projection) -> NDArray[np.float32]:
    """Return (N, 2) places of (N, D) features: similar ones are near to each other. Equal features have equal maps.

    "pca": the two principal components of the features; "umap": keeps neighbours together, and takes half a minute.

    Raises:
        MachineShort: umap-learn is not installed.

    Source:
        L. McInnes, J. Healy, J. Melville, "UMAP: Uniform Manifold Approximation and Projection" (2018).
    """
    values = features.astype(np.float32)
    values -= values.mean(axis=0)
    _, vectors = np.linalg.eigh(values.T @ values)
    axes = vectors[:, : -1 - _COMPONENTS : -1]
    # The sign of an axis is arbitrary: its largest part is positive.
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    places = values @ np.pad(axes, ((0, 0), (0, max(0, 2 - axes.shape[1]))))
    if method == "umap" and len(values) > _NEIGHBOURS:
        with needs_extra("umap", "UMAP needs umap-learn, which is not installed"):
            import umap  # late: the extra [umap]
        model = umap.UMAP(n_neighbors=_NEIGHBOURS, random_state=1, n_jobs=1, init="pca")
        places = model.fit_transform(places)
    return np.asarray(places[:, :2], np.float32)
