"""Test `predict` of models of patches: from stores and from slide files, with networks of NumPy."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import tifffile

import histopipe
from helpers.commands import run_command
from helpers.networks import KerasNetwork, probabilities, replace_networks
from helpers.results import files
from helpers.runs import without_training
from helpers.scores import class_predictions
from helpers.slides import TCGA
from helpers.stores import RECORD, a_store, jpegs
from helpers.trainings import csv_rows
from histopipe.errors import DamagedStore, HistopipeError
from histopipe.evaluation.evaluate import tempered
from histopipe.geometry import Mpp
from histopipe.inference.slide_run import PatchBatch, Results, SlideRun
from histopipe.inference.slide_tiler import FileSource
from histopipe.ingestion.slide_job import SlideJob
from histopipe.predicting.predict import predict
from histopipe.predictions.sources import PredictedSlide
from histopipe.reports.report import report
from histopipe.runs.run import Run
from histopipe.slides.slide_files import SlideFile
from histopipe.splits.splits import SlideSplit, Splits, trained_on, write_splits
from histopipe.store.store import Store
from histopipe.system.forecast import Outlook
from histopipe.system.output import default_progress
from histopipe.tasks.predictions import Predictions, joined_predictions

pytestmark = pytest.mark.usefixtures("numpy_networks")


@pytest.fixture(scope="module")
def cohort(golden_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run on the store, without a model, and its predictions of the store and of the slides."""
    folder, store = tmp_path_factory.mktemp("cohort"), golden_runs / "store.lmdb"
    with pytest.MonkeyPatch.context() as patch, without_training():
        replace_networks(patch)
        run = folder / "run"
        histopipe.train(store, out=run, calibrate=True, resamples=20, split_by="slide", epochs=1)
        predict(run, store, out=folder / "store")
        slides = sorted((golden_runs / "slides").glob("*.svs"))[:8]
        labels: dict[str, Any] = {"labels": golden_runs / "labels.csv", "allow_extra_rows": True}
        patch.setattr("histopipe.ingestion.patch_source._STRIP", 128)  # another order of patches
        predict(run, slides, out=folder / "slides", batch_size=10, **labels)
    return folder


def test_probabilities_are_those_of_the_network_with_the_temperature(
    cohort: Path, golden_runs: Path
) -> None:
    calibration = Run(cohort / "run").result.calibration
    assert calibration is not None and calibration.temperature != (1.0,)
    with Store(golden_runs / "store.lmdb") as store:
        for number in (0, 7):
            record, index = store.records[number], store.index(number)
            table = pd.read_csv(cohort / "store" / "patches" / f"{record.id}.csv")
            assert len(table) == record.stored
            corners = list(zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True))
            table = table.set_index(["x_l0", "y_l0"]).loc[corners]
            images = np.stack([store.read(record.id, row) for row in range(record.stored)])
            expected = tempered(probabilities(images, "run"), calibration.temperature)
            np.testing.assert_allclose(table[["p_normal", "p_tumour"]], expected, atol=1e-5)
            assert set(table["label"]) == {record.label}
            classes = np.array(["normal", "tumour"])
            assert table["predicted"].tolist() == classes[expected.argmax(axis=1)].tolist()


def test_predictions_from_slide_files_equal_those_from_the_store(
    cohort: Path, golden_runs: Path
) -> None:
    """They are equal bit by bit, because the same code makes the patches. Heatmaps use the thumbnails."""
    from_store, from_files = files(cohort / "store"), files(cohort / "slides")
    different = {name for name, content in from_store.items() if from_files[name] != content}
    assert from_files.keys() == from_store.keys()
    with Store(golden_runs / "store.lmdb") as store:
        described = {f"patches/{record.id}.json" for record in store.complete.values()}
        assert different == {"participants.csv", "predict.json", *described}  # they name the source
        for number, record in store.complete.items():
            assert from_files[f"patches/{record.id}.jpg"] == store.thumbnail(number)


def test_slide_and_patient_predictions_are_means_of_patches(cohort: Path) -> None:
    folder = cohort / "store"
    patches = pd.concat(map(pd.read_csv, (folder / "patches").glob("*.csv"))).groupby("slide")
    slides = pd.read_csv(folder / "slides.csv", index_col="slide")
    columns = "patient label patches predicted decided p_normal p_tumour"
    assert list(slides) == columns.split()
    assert not (folder / "unusual").exists()  # the run has no range, as those of earlier versions
    mean = patches["p_tumour"].mean()
    pd.testing.assert_series_equal(slides["p_tumour"], mean, rtol=0, atol=1e-6)
    assert slides["patches"].tolist() == patches.size().tolist()
    assert slides["predicted"].tolist() == np.where(mean > 0.5, "tumour", "normal").tolist()
    metrics = json.loads((folder / "evaluation.json").read_text())["test"]
    threshold = metrics["slide"]["mean"]["thresholds"]["values"][0]
    assert ((slides["decided"] == "tumour") == (slides["p_tumour"] >= threshold)).all()
    count = slides["patches"].sum()
    assert pd.read_csv(folder / "patients.csv")["patches"].sum() == count
    assert metrics["patch"]["count"] == count


def test_bad_slides_do_not_affect_other_slides(
    golden_runs: Path, data: Path, tmp_path: Path
) -> None:
    run, folder, out = golden_runs / "run", tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    slides = golden_runs / "slides/slide-000.svs", data / "slides" / f"{TCGA}.svs"
    for path in (*slides, data / "bad" / "broken.svs"):
        shutil.copy(path, folder)
    done = run_command("predict", run, folder, "--out", out, "--json")
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout)
    assert result["done"] == ["slide-000"] and set(result["failed"]) == {"broken", TCGA}
    assert "no usable mpp" in result["failed"][TCGA]
    # Now that the scale is given, only the missing slide is predicted.
    assert predict(run, folder, out=out, default_mpp=0.25).done == (TCGA,)
    assert csv_rows(out / "patients.csv")[0]["patient"] == "TCGA-CR-7395"


def test_errors_of_predict(golden_runs: Path, small_store: Path, tmp_path: Path) -> None:
    run, slides, store = (golden_runs / name for name in ("run", "slides", "store.lmdb"))
    (tmp_path / "empty").mkdir()
    coarse = a_store(tmp_path / "coarse.lmdb", {"n": jpegs(0, 1, 64)}, patch_size=64, mpp=Mpp(1))
    slide = slides / "slide-000.svs"
    assert len(predict(run, slide, out=tmp_path / "b").done) == 1
    cases: list[tuple[int, str, Path, tuple[Path, ...], dict[str, Any]]] = [
        (2, "expected a metrics.json in it; finish it with", tmp_path, (slides,), {}),
        (2, "expected a metrics.json in it; check the path", tmp_path / "none", (slides,), {}),
        (4, "nowhere does not exist", run, (tmp_path / "nowhere",), {}),
        (2, "slides and stores are mixed", run, (slides, store), {}),
        (4, "no slide in", run, (tmp_path / "empty",), {}),
        (2, "coarse.lmdb: the scale of its patches differs", run, (coarse,), {}),
        (2, "small.lmdb: the size of its patches differs", run, (small_store,), {}),
        (
            2,
            "contains predictions computed with other settings",
            run,
            (slide,),
            {"out": tmp_path / "b", "overlap": 32},
        ),
        (2, "holds files that are not predictions", run, (slide,), {"out": tmp_path}),
        (2, "--overlap: found a store", run, (store,), {"overlap": 32}),
        (2, "--workers: found a store", run, (store,), {"workers": 9}),
        *((2, "expected from 0.05 to 50", run, (slides,), {"default_mpp": m}) for m in (0, np.nan)),
    ]
    for code, message, folder, sources, options in cases:
        with pytest.raises(HistopipeError, match=message) as error:
            predict(folder, sources, **{"out": tmp_path / "a", **options})
        assert error.value.exit_code == code


NAN = 99
"""Pixel for which the network returns a value that is not finite."""


def a_slide(number: int, fails: str = "") -> Any:
    """Return a slide with three batches of two patches, whose pixels and corners are its number."""

    def load(step: int) -> PatchBatch:
        if fails == "load" and step == 1:
            raise KeyError("load")
        images = np.full((2, 1, 1, 3), number, np.uint8)
        images[1] = NAN if fails == "nan" and step == 1 else number
        return PatchBatch(images, np.full((2, 2), number), np.ones(2, np.bool_))

    values: dict[str, Any] = {"rows": 6, "steps": 3, "waits_for": "disk", "load": load}
    return Mock(id=f"s{number}", number=number, fails=fails, **values)


def test_error_of_one_slide_leaves_the_others(tmp_path: Path) -> None:
    """Every other slide gets its own results. An error of the network ends the run."""
    slides = [
        a_slide(n, {1: "load", 3: "write", 4: "nan", 5: "complete"}.get(n, "")) for n in range(8)
    ]

    def slide_run(broken: int = -1) -> SlideRun:
        """Return a run with a network that returns the first value of each patch, and fails at one."""

        def compute(images: Any) -> Any:
            values = images[:, 0, 0, :1].astype(np.float64)
            if values[0] == broken:
                raise RuntimeError("the device is lost")
            return np.where(values == NAN, np.nan, values)

        network: Any = KerasNetwork(lambda: (1, compute), name="x", devices="cpu", batch_size=2)
        return SlideRun(
            network, "predicting", len(slides), default_progress(), tmp_path, Outlook({})
        )

    def is_complete(slide: Any) -> bool:
        if slide.fails == "complete":
            raise OSError(errno.ENAMETOOLONG, "File name too long", slide.id)
        return bool(slide.number == 6)

    def write(slide: Any, results: Iterator[Results]) -> tuple[int, int]:
        if slide.fails == "write":
            raise TypeError("write")
        for values, corners in results:
            right = (values == slide.number) | np.isnan(values)
            assert right.all() and (corners == slide.number).all()
        return 6, 0

    run = slide_run()
    run.run(run.missing(slides, is_complete), write)
    assert (run.done, run.kept) == (["s0", "s2", "s7"], ["s6"])
    reasons = {name: reason.split(";")[0] for name, reason in run.failed.items()}
    assert reasons == {
        "s5": "File name too long: s5",
        "s1": "KeyError: 'load'",
        "s3": "TypeError: write",
        "s4": "s4: a result of the network is not finite: found nan for the patch at x, y [4, 4], "
        "expected a number",
    }
    run = slide_run(broken=2)
    with pytest.raises(RuntimeError, match="the device is lost"):
        run.run(map(a_slide, range(8)), write)
    assert run.done == ["s0", "s1"]


@pytest.mark.nightly(reason="loads TensorFlow; test_augmentation.py shows the normalization")
def test_stain_normalization_of_the_run_is_applied(golden_runs: Path, tmp_path: Path) -> None:
    store, run = tmp_path / "stained.lmdb", tmp_path / "run"
    shutil.copytree(golden_runs / "store.lmdb", store)
    histopipe.stains(store)
    with without_training():
        histopipe.train(store, out=run, epochs=1, resamples=0, stain_norm="reinhard")
    predict(run, store, out=tmp_path / "stored")
    predict(run, sorted((golden_runs / "slides").glob("*.svs"))[:8], out=tmp_path / "files")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('"reinhard"', '"none"'))
    predict(run, store, out=tmp_path / "plain")
    stored, from_files, plain = (
        pd.read_csv(tmp_path / name / "slides.csv", index_col="slide")["p_tumour"]
        for name in ("stored", "files", "plain")
    )
    # Without a store, the stain is measured on other patches of the slide.
    assert 3 * (stored - from_files).abs().max() < (stored - plain).abs().max()


def test_damaged_slide_files_of_predictions_are_detected(tmp_path: Path) -> None:
    path, slide = tmp_path / "a.json", PredictedSlide.of(RECORD, source="x")
    slide.write(path)
    assert PredictedSlide.read(path) == slide
    changes = ({"bounds": [1, 2]}, {"width": "x"}, {"more": 1}, {"slide": None, "width": None})
    for value in (*(asdict(slide) | change for change in changes), [1]):
        path.write_text(json.dumps(value))
        with pytest.raises(DamagedStore, match=r"a\.json is damaged"):
            PredictedSlide.read(path)


def test_joined_predictions_keep_slides_and_patients() -> None:
    def part(slide: str, patient: str, n: int) -> Predictions:
        zeros, position = np.zeros(n, np.int32), np.arange(n)
        return class_predictions(
            ("a", "b"),
            (slide,),
            (patient,),
            slide=zeros,
            patient=zeros,
            x_l0=position,
            y_l0=position,
            label=zeros,
            probability=np.full((n, 2), n / 10, np.float32),
        )

    joined = joined_predictions([part("z", "p", 2), part("a", "q", 3), part("m", "p", 1)])
    assert [joined.slides[i] for i in joined.slide] == ["z", "z", "a", "a", "a", "m"]
    assert [joined.patients[i] for i in joined.patient] == ["p", "p", "q", "q", "q", "p"]
    assert joined.output[:, 0].tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.3, 0.1])


def test_labels_can_be_added_later(
    golden_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fresh, labels = (tmp_path / name for name in ("out", "fresh", "labels.csv"))
    slides = [golden_runs / "slides" / f"slide-00{number}.svs" for number in (0, 1)]
    assert len(predict(golden_runs / "run", slides, out=out).done) == 2
    for path in (out / "slides.csv", *(out / "patches").glob("*.csv")):
        assert {row["label"] for row in csv_rows(path)} == {""}
    assert not (out / "evaluation.json").exists()
    assert "the training used 2 of these slides" in capsys.readouterr().err
    labels.write_text("slide,label,patient\nslide-000,normal,A\nslide-001,tumour,A\n")
    assert len(predict(golden_runs / "run", slides, out=out, labels=labels).kept) == 2
    assert [row["label"] for row in csv_rows(out / "slides.csv")] == ["normal", "tumour"]
    assert [row["patient"] for row in csv_rows(out / "patients.csv")] == ["A"]
    predict(golden_runs / "run", slides, out=fresh, labels=labels)
    assert (fresh / "evaluation.json").exists() and files(fresh) == files(out)


def test_failed_and_empty_slides_in_the_table(golden_runs: Path, tmp_path: Path) -> None:
    """Also of a slide whose name begins like that of an unfinished file."""
    folder, out, trained = tmp_path / "some", tmp_path / "out", tmp_path / "run"
    folder.mkdir()
    for name in ("part-x.svs", "slide-001.svs"):
        shutil.copy(golden_runs / "slides" / "slide-001.svs", folder / name)
    shutil.copytree(golden_runs / "run", trained)
    text = (trained / "metrics.json").read_text()  # a run on patches with tissue
    (trained / "metrics.json").write_text(text.replace('"tissue": "none"', '"tissue": "otsu"'))
    scale: dict[str, Any] = {"resolution": (20_000, 20_000), "resolutionunit": 3}
    white = np.full((1024, 1024, 3), 245, np.uint8)
    tifffile.imwrite(folder / "blank.tiff", white, tile=(256, 256), photometric="rgb", **scale)
    assert not predict(trained, folder, out=out).failed
    rows = {row["slide"]: row for row in csv_rows(out / "slides.csv")}
    assert set(rows) == {"blank", "part-x", "slide-001"}
    blank = rows["blank"]
    assert (blank["patches"], blank["predicted"], blank["p_tumour"]) == ("0", "", "")
    (folder / "slide-001.svs").write_text("no slide any more")
    assert set(predict(trained, folder, out=out).failed) == {"slide-001"}
    assert {row["slide"] for row in csv_rows(out / "slides.csv")} == {"blank", "part-x"}
    assert "Failed, and not predicted: slide-001." in report(out).file.read_text()


def test_level_with_a_different_scale_fails(golden_runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(golden_runs / "run", tmp_path / "copy")
    metrics = json.loads((copy / "metrics.json").read_text())
    metrics["spec"] |= {"mpp": None, "level": 1}
    (copy / "metrics.json").write_text(json.dumps(metrics))
    result = predict(copy, golden_runs / "slides" / "slide-000.svs", out=tmp_path / "out")
    assert "the scale of its patches differs" in next(iter(result.failed.values()))


def test_trained_on_ignores_patches_that_were_left_out(tmp_path: Path) -> None:
    path, rest = tmp_path / "splits.json", (None, None, 2, 0)
    subsets = {"train": [0, 0], "test": [2, -1], "both": [2, 0], "validation": [1, -1]}
    slides = (
        SlideSplit(0, 0, name, "a", name, *rest, np.array(numbers, np.int8))
        for name, numbers in subsets.items()
    )
    write_splits(Splits("slide", 1, (0.7, 0.15, 0.15), ("x",), ("a",), tuple(slides)), path)
    assert trained_on(path) == {
        (kind, name) for kind in ("slide", "patient") for name in ("train", "both", "validation")
    }
    assert trained_on(tmp_path / "nothing.json") == set()


@pytest.mark.parametrize(
    ("mpp", "source", "csv", "default", "complete"),
    [
        (0.25, "properties", None, None, True),
        (0.25, "properties", 0.25, None, True),
        (0.25, "properties", 0.5, None, False),
        (0.25, "properties", None, 0.5, True),
        (0.25, "objective-power", None, 0.5, True),
        (0.25, "mpp-csv", 0.5, None, False),
        (0.25, "default-mpp", None, 0.5, False),
        (0.25, "default-mpp", None, 0.25, True),
        (None, None, 0.5, None, False),
    ],
)
def test_slides_are_predicted_again_with_another_scale(
    tmp_path: Path,
    mpp: float | None,
    source: str | None,
    csv: float | None,
    default: float | None,
    complete: bool,
) -> None:
    path = tmp_path / "a.svs"
    path.write_bytes(b"a slide")
    tiler: Any = SimpleNamespace(
        options=SimpleNamespace(default_mpp=default), source_text=lambda *_: "the same file"
    )
    predicted: Any = SimpleNamespace(mpp=mpp, mpp_source=source)
    job = SlideJob(SlideFile("a", path, (path,)), mpp=Mpp(csv) if csv else None)
    assert FileSource._is_complete(tiler, job, lambda *_: predicted) is complete
