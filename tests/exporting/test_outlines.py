"""Outlines of labelled patches: read back, they give each patch its class."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from histopipe import annotate, export
from histopipe.errors import NothingToDo
from histopipe.exporting.patches import ExportResult
from histopipe.store.store import Store


def test_outlines_label_the_same_patches(viewed: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb"))
    with Store(store) as opened:
        before, classes = opened.index(0)["label"].copy(), opened.classes
    result = export(store, to="outlines", out=tmp_path / "outlines")
    assert isinstance(result, ExportResult)
    assert (result.files, result.patches) == (1, int((before >= 0).sum()))
    annotated = annotate(store, tmp_path / "outlines")
    assert annotated.patches == {
        name: int((before == number).sum()) for number, name in enumerate(classes)
    }
    with Store(store) as opened:
        np.testing.assert_array_equal(opened.index(0)["label"], before)
        covered = opened.index(0)["covered"][before >= 0]
    np.testing.assert_allclose(covered, 1, atol=0.02)


def test_a_store_without_classes_has_no_outlines(small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=r"no patch of .* has a class"):
        export(small_store, to="outlines", out=tmp_path / "outlines")
