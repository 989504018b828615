"""Areas of a segmentation as covariates: of slides that the segmentation was not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.bags import a_bag, write_bag
from histopipe.errors import UsageError
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import opened_sources

SLIDES = ("s1", "s2", "s3", "s4")


@pytest.fixture
def bags(tmp_path: Path) -> Path:
    for number, name in enumerate(SLIDES):
        write_bag(tmp_path / "bags" / f"{name}.h5", a_bag(number, 5, positive=number > 1))
    rows = [f"{name},{'ab'[number > 1]},{40 + number}" for number, name in enumerate(SLIDES)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,label,age", *rows]))
    return tmp_path / "bags"


def write_areas(folder: Path, rows: dict[str, tuple[float, str]]) -> str:
    folder.mkdir()
    lines = [f"{slide},p{slide},9,0.5,{share},{used}" for slide, (share, used) in rows.items()]
    header = "slide,patient,patches,area_mm2_gland,share_gland,in_training"
    (folder / "slides.csv").write_text("\n".join([header, *lines]))
    return str(folder)


def cells(bags: Path, areas: list[str], **settings: Any) -> dict[str, list[str]]:
    """Return the covariates of each slide."""
    config = make_config(
        {
            "mil": [str(bags)],
            "labels": str(bags.parent / "labels.csv"),
            "covariates": ["age", "share_gland"],
            "areas": areas,
            **settings,
        }
    )
    with opened_sources(config) as (source,):
        of_bags = {bag.id: bag.cells for bag in source.complete.values()}  # type: ignore[attr-defined]  # of bags
    return {slide: [of[name] for name in ("age", "share_gland")] for slide, of in of_bags.items()}


def test_areas_are_covariates_by_slide(bags: Path, tmp_path: Path) -> None:
    first = write_areas(tmp_path / "p1", {"s1": (0.1, "no"), "s2": (0.2, "yes"), "s3": (0.3, "no")})
    second = write_areas(
        tmp_path / "p2", {"s1": (0.9, "yes"), "s2": (0.25, "no"), "other": (1, "no")}
    )
    assert cells(bags, [first, second]) == {
        "s1": ["40", "0.1"],
        "s2": ["41", "0.25"],  # of the run that was not trained on it
        "s3": ["42", "0.3"],
        "s4": ["43", ""],  # no map: missing
    }


def test_slides_of_the_training_are_refused(bags: Path, tmp_path: Path) -> None:
    areas = write_areas(tmp_path / "p", {"s1": (0.1, "no"), "s2": (0.2, "yes"), "s3": (0.3, "yes")})
    with pytest.raises(UsageError, match=r"trained on: slides s2, s3, .*--allow-leaks"):
        cells(bags, [areas])
    assert cells(bags, [areas], allow_leaks=True)["s2"] == ["41", "0.2"]


def test_other_tables_are_refused(bags: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none/slides\.csv does not exist"):
        cells(bags, [str(tmp_path / "none")])
    areas = write_areas(tmp_path / "p", {"s1": (0.1, "no")})
    with pytest.raises(UsageError, match=r"column share_stroma: .*such as slide, patient"):
        cells(bags, [areas], covariates=["share_stroma"])
