"""Features in two dimensions: principal components, also of few features, and UMAP."""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import pytest

from histopipe.errors import MachineShort
from histopipe.features.projection import project


def test_principal_components_keep_most_of_the_distances() -> None:
    rng = np.random.default_rng(1)
    plane = rng.normal(size=(40, 2)) * [5, 2]
    basis = np.linalg.qr(rng.normal(size=(7, 2)))[0]
    features = (plane @ basis.T + 100).astype(np.float16)
    places = project(features, "pca")
    distances, expected = (
        np.linalg.norm(each[:, None] - each[None], axis=2) for each in (places, plane)
    )
    np.testing.assert_allclose(distances, expected, atol=0.3)
    assert places[:, 0].var() > places[:, 1].var()
    np.testing.assert_array_equal(project(features, "pca"), places)


@pytest.mark.parametrize("shape", [(1, 5), (2, 3), (9, 1), (3, 2)])
def test_few_patches_and_features(shape: tuple[int, int]) -> None:
    features = np.random.default_rng(1).normal(size=shape)
    for method in ("pca", "umap"):
        places = project(features, method)
        assert places.shape == (shape[0], 2) and np.isfinite(places).all()


def test_umap_without_its_library_is_explained() -> None:
    with (
        mock.patch.dict(sys.modules, {"umap": None}),
        pytest.raises(MachineShort, match=r"UMAP needs umap-learn.*\[umap\]"),
    ):
        project(np.eye(20), "umap")


@pytest.mark.nightly(reason="loads umap-learn; test_umap_without_its_library_is_explained")
@pytest.mark.filterwarnings("ignore")
def test_umap_keeps_groups_together() -> None:
    rng = np.random.default_rng(1)
    group = np.repeat([0, 1, 2], 60)
    features = rng.normal(size=(180, 20)) + 8 * np.eye(20)[group]
    places = project(features, "umap")
    near = np.linalg.norm(places[:, None] - places[None], axis=2).argsort(axis=1)[:, 1:6]
    assert (group[near] == group[:, None]).mean() > 0.98
    np.testing.assert_array_equal(project(features, "umap"), places)
