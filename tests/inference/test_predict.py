"""Test `predict` of models of patches: from stores and from slide files, with networks of NumPy."""

from __future__ import annotations

import errno
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.commands import run_command
from helpers.networks import probabilities, replace_networks
from helpers.results import files
from helpers.runs import without_training
from helpers.scores import class_predictions
from helpers.stores import a_store, jpegs
from helpers.trainings import csv_rows
from histopipe.dataset.patch_batches import decode
from histopipe.errors import DamagedStore, HistopipeError, UsageError
from histopipe.evaluation.evaluate import tempered
from histopipe.geometry import Mpp
from histopipe.inference.options import PredictOptions
from histopipe.inference.predict import predict
from histopipe.inference.slide_run import PatchBatch, Results, SlideRun
from histopipe.inference.slide_tiler import FileSource, source_of_files
from histopipe.ingestion.slide_job import SlideJob
from histopipe.predictions.sources import PredictedSlide, PredictionsFolder
from histopipe.reports.report import report
from histopipe.runs.result import read_result
from histopipe.slides.slide_files import SlideFile
from histopipe.splits.splits import SlideSplit, Splits, trained_on, write_splits
from histopipe.store.store import Store
from histopipe.system.output import default_progress
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.task import Predictions
from histopipe.tiling.spec import TilingSpec

pytestmark = pytest.mark.usefixtures("numpy_networks")


def patch_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "patches").rglob("*.csv"))}


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
    calibration = read_result(cohort / "run").calibration
    assert calibration is not None and calibration.temperature != (1.0,)
    with Store(golden_runs / "store.lmdb") as store:
        for number in (0, 7):
            record = store.records[number]
            rows = csv_rows(cohort / "store" / "patches" / f"{record.id}.csv")
            index = store.index(number)
            row_of = {
                corner: row
                for row, corner in enumerate(
                    zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)
                )
            }
            assert len(rows) == len(row_of) == record.stored
            order = [row_of[int(row["x_l0"]), int(row["y_l0"])] for row in rows]
            images = np.stack([store.read(record.id, row) for row in order])
            expected = tempered(probabilities(images, "run"), calibration.temperature)
            values = np.array([[float(row["p_normal"]), float(row["p_tumour"])] for row in rows])
            np.testing.assert_allclose(values, expected, atol=1e-5)
            assert {row["label"] for row in rows} == {record.label}
            most_probable = [("normal", "tumour")[i] for i in values.argmax(axis=1)]
            assert [row["predicted"] for row in rows] == most_probable


def test_predictions_from_slide_files_equal_those_from_the_store(
    cohort: Path, golden_runs: Path
) -> None:
    """They are equal bit by bit, because the same code makes the patches. Heatmaps use the thumbnails."""
    assert patch_files(cohort / "slides") == patch_files(cohort / "store")
    assert len(patch_files(cohort / "slides")) == 8
    for name in ("slides.csv", "patients.csv", "evaluation.json"):
        assert (cohort / "slides" / name).read_bytes() == (cohort / "store" / name).read_bytes()
    assert not list((cohort / "slides").rglob("data.mdb"))
    with Store(golden_runs / "store.lmdb") as store:
        kept = {f"{record.id}.jpg": store.thumbnail(n) for n, record in store.complete.items()}
    for kind in ("store", "slides"):
        folder = cohort / kind / "patches"
        assert {path.name: path.read_bytes() for path in folder.glob("*.jpg")} == kept


def test_slide_and_patient_predictions_are_means_of_patches(cohort: Path) -> None:
    folder = cohort / "store"
    patches: dict[str, list[float]] = defaultdict(list)
    for name in patch_files(folder):
        for row in csv_rows(folder / "patches" / name):
            patches[row["slide"]].append(float(row["p_tumour"]))
    slides = csv_rows(folder / "slides.csv")
    assert list(slides[0]) == [
        "slide",
        "patient",
        "label",
        "patches",
        "predicted",
        "decided",
        "p_normal",
        "p_tumour",
    ]
    assert not (folder / "unusual").exists()  # the run has no range, as those of earlier versions
    assert [row["slide"] for row in slides] == sorted(patches)
    for row in slides:
        mean = float(np.mean(patches[row["slide"]]))
        assert float(row["p_tumour"]) == pytest.approx(mean, abs=1e-6)
        assert row["predicted"] == ("tumour" if mean > 0.5 else "normal")
        assert int(row["patches"]) == len(patches[row["slide"]])
    by_patient = csv_rows(folder / "patients.csv")
    assert sum(int(row["patches"]) for row in by_patient) == sum(map(len, patches.values()))
    metrics = json.loads((folder / "evaluation.json").read_text())["test"]
    assert metrics["patch"]["count"] == sum(map(len, patches.values()))
    threshold = metrics["slide"]["mean"]["thresholds"]["values"][0]
    assert all((float(r["p_tumour"]) >= threshold) == (r["decided"] == "tumour") for r in slides)


def test_bad_slides_do_not_affect_other_slides(
    golden_runs: Path, data: Path, tmp_path: Path
) -> None:
    folder, tcga = tmp_path / "in", "TCGA-CR-7395-01A-01-TS1"
    folder.mkdir()
    for path in (
        golden_runs / "slides" / "slide-000.svs",
        data / "bad" / "broken.svs",
        data / "slides" / f"{tcga}.svs",
    ):
        shutil.copy(path, folder)
    done = run_command("predict", golden_runs / "run", folder, "--out", tmp_path / "out", "--json")
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout)
    assert result["done"] == ["slide-000"]
    assert set(result["failed"]) == {"broken", tcga}
    assert "no usable mpp" in result["failed"][tcga]
    # Now that the scale is given, only the missing slide is predicted.
    again = predict(golden_runs / "run", folder, out=tmp_path / "out", default_mpp=0.25)
    assert again.done == (tcga,)
    assert list(again.failed) == ["broken"]
    assert csv_rows(tmp_path / "out" / "patients.csv")[0]["patient"] == "TCGA-CR-7395"


def test_errors_of_predict(golden_runs: Path, small_store: Path, tmp_path: Path) -> None:
    def refused(code: int, message: str, folder: Path, *sources: Path, **options: Any) -> None:
        with pytest.raises(HistopipeError) as error:
            predict(folder, sources, out=tmp_path / options.pop("out", "a"), **options)
        assert (error.value.exit_code, message in str(error.value)) == (code, True), error.value

    run, slides, store = (golden_runs / name for name in ("run", "slides", "store.lmdb"))
    refused(2, "expected a metrics.json in it; finish it with", tmp_path, slides)
    refused(2, "expected a metrics.json in it; check the path", tmp_path / "none", slides)
    refused(4, "nowhere does not exist", run, tmp_path / "nowhere")
    refused(2, "slides and stores are mixed", run, slides, store)
    (tmp_path / "empty").mkdir()
    refused(4, "no slide in", run, tmp_path / "empty")
    coarse = a_store(tmp_path / "coarse.lmdb", {"n": jpegs(0, 1, 64)}, patch_size=64, mpp=Mpp(1))
    refused(2, "coarse.lmdb: the scale of its patches differs", run, coarse)
    refused(2, "small.lmdb: the size of its patches differs", run, small_store)
    slide = slides / "slide-000.svs"
    assert len(predict(run, slide, out=tmp_path / "b").done) == 1
    message = "contains predictions computed with other settings"
    refused(2, message, run, slide, out="b", overlap=32)
    for options in ({"overlap": 32}, {"workers": 9}):
        refused(2, f"--{next(iter(options))}: found a store", run, store, **options)
    for mpp in (-1.0, 0.0, float("nan")):
        refused(2, "expected from 0.05 to 50", run, slides, default_mpp=mpp)


ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "copy": ({"patch_size": 256}, "slide-000.svs"),
    "decode": ({"patch_size": 64}, "slide-000.svs"),
    "openslide": ({"patch_size": 128, "mpp": 0.6}, "TCGA-CR-7395-01A-01-TS1.svs"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_pixels_equal_those_of_a_store_for_every_route(
    route: str, data: Path, golden_runs: Path, tmp_path: Path
) -> None:
    settings, name = ROUTES[route]
    folder, store_path = tmp_path / "slides", tmp_path / "patches.lmdb"
    folder.mkdir()
    places = (golden_runs / "slides" / name, data / "slides" / name)
    shutil.copy(next(path for path in places if path.exists()), folder)
    spec = TilingSpec(**{"mpp": 0.5, **settings})
    histopipe.ingest(folder, store_path, patch_size=spec.patch_size, mpp=spec.mpp, default_mpp=0.25)
    model: Any = SimpleNamespace(spec=spec.to_json(), stain_norm="none", patch_mpp=None)
    options = PredictOptions(batch_size=7, default_mpp=Mpp(0.25), workers=1)
    network: Any = None
    slides = SlideRun(network, "predicting", 1, default_progress(), tmp_path)
    with (
        source_of_files([folder], model, options, default_progress()) as files,
        Store(store_path) as store,
    ):
        (slide,) = files.slides(slides, PredictionsFolder(tmp_path / "out").complete)
        assert slide is not None
        assert store.records[0].route == route
        batches = [slide.load(step) for step in range(slide.steps)]
        pixels = {
            tuple(corner): image
            for batch in batches
            for corner, image in zip(
                batch.corners[batch.valid].tolist(), batch.images[batch.valid], strict=True
            )
        }
        index = store.index(0)
        assert len(pixels) == store.records[0].stored >= (1 if route == "copy" else 4)
        for row in range(len(pixels)):
            out = np.empty((spec.patch_size, spec.patch_size, 3), np.uint8)
            decode(memoryview(store.value(0, row)), out)
            corner = int(index["x_l0"][row]), int(index["y_l0"][row])
            assert np.array_equal(pixels[corner], out)
        # A patch that cannot be decoded is left out of the sample for the stain.
        rows = np.arange(min(3, len(pixels)))
        without, values = slide._sample(rows[1:]), slide._values(slide.plan.plan.take(rows))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slide, "_values", lambda _: [b"no picture", *values[1:]])
            assert np.array_equal(slide._sample(rows), without)
    assert not slides.failed


class FakeSlide:
    """A slide with three batches of two patches, whose pixels and corners are its number."""

    rows, waits_for = 6, "disk"

    def __init__(self, number: int, fails: str = "") -> None:
        self.id, self.number, self.fails, self.steps = f"s{number}", number, fails, 3

    def load(self, step: int) -> PatchBatch:
        if self.fails == "load" and step == 1:
            raise KeyError("load")
        images = np.full((2, 1, 1, 3), self.number, np.uint8)
        images[1] = FakeNetwork.nan if self.fails == "nan" and step == 1 else self.number
        return PatchBatch(images, np.full((2, 2), self.number), np.ones(2, np.bool_))

    def close(self) -> None:
        pass


class FakeNetwork:
    """Returns the first value of each patch."""

    broken, nan, batch_size = -1, 99, 2

    def prepare(self, images: Any) -> Any:
        return images

    def start(self, inputs: Any) -> Any:
        return inputs

    def finish(self, started: Any) -> Any:
        if started[0, 0, 0, 0] == self.broken:
            raise RuntimeError("the device is lost")
        values = started[:, 0, 0, :1].astype(np.float32)
        return np.where(values == self.nan, np.nan, values)


def test_error_of_one_slide_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other slide gets its own results. An error of the network ends the run."""
    slides: Any = [
        FakeSlide(n, {1: "load", 3: "write", 4: "nan", 5: "complete"}.get(n, "")) for n in range(8)
    ]
    network: Any = FakeNetwork()
    run = SlideRun(network, "predicting", len(slides), default_progress(), tmp_path)

    def is_complete(slide: FakeSlide) -> bool:
        if slide.fails == "complete":
            raise OSError(errno.ENAMETOOLONG, "File name too long", slide.id)
        return slide.number == 6

    def write(slide: Any, results: Iterator[Results]) -> tuple[int, int]:
        if slide.fails == "write":
            raise TypeError("write")
        for values, corners in results:
            right = (values == slide.number) | np.isnan(values)
            assert right.all() and (corners == slide.number).all()
        return 6, 0

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
    network.broken = 2
    run = SlideRun(network, "predicting", len(slides), default_progress(), tmp_path)
    slides = [FakeSlide(n) for n in range(8)]
    with pytest.raises(RuntimeError, match="the device is lost"):
        run.run(slides, write)
    assert run.done == ["s0", "s1"]


@pytest.mark.nightly(reason="loads TensorFlow; test_augmentation.py shows the normalization")
def test_stain_normalization_of_the_run_is_applied(golden_runs: Path, tmp_path: Path) -> None:
    store, run = (
        shutil.copytree(golden_runs / "store.lmdb", tmp_path / "stained.lmdb"),
        tmp_path / "run",
    )
    histopipe.stains(store)
    with without_training():
        histopipe.train(store, out=run, epochs=1, resamples=0, stain_norm="reinhard")
    slides = sorted((golden_runs / "slides").glob("*.svs"))[:8]
    for name, source in (("stored", store), ("files", slides), ("plain", store)):
        if name == "plain":
            config = (run / "config.toml").read_text().replace('"reinhard"', '"none"')
            (run / "config.toml").write_text(config)
        assert not predict(run, source, out=tmp_path / name).failed
    tables = [csv_rows(tmp_path / name / "slides.csv") for name in ("stored", "files", "plain")]
    stored, from_files, plain = (np.array([float(r["p_tumour"]) for r in rows]) for rows in tables)
    # Without a store, the stain is measured on other patches of the slide.
    assert 3 * np.abs(stored - from_files).max() < np.abs(stored - plain).max()


def test_damaged_slide_files_of_predictions_are_detected(tmp_path: Path) -> None:
    description: dict[str, Any] = {
        "slide": "a",
        "patient": "a",
        "label": None,
        "width": 10,
        "height": 10,
        "bounds": [0, 0, 10, 10],
        "mpp": None,
        "mpp_source": None,
        "size_l0": 4.0,
        "stride_l0": 4.0,
        "source": "x",
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(description))
    assert PredictedSlide.read(path).size_l0 == 4
    for change in ({"bounds": [1, 2]}, {"width": "x"}, {"more": 1}, {"slide": None, "width": None}):
        path.write_text(json.dumps(description | change))
        with pytest.raises(DamagedStore, match=r"a\.json is damaged"):
            PredictedSlide.read(path)
    path.write_text("[1]")
    with pytest.raises(DamagedStore):
        PredictedSlide.read(path)


def test_joined_predictions_keep_slides_and_patients() -> None:
    def part(slide: str, patient: str, n: int) -> Predictions:
        zeros = np.zeros(n, np.int32)
        position = np.arange(n, dtype=np.int64)
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
    names = [joined.slides[i] for i in joined.slide]
    assert names == ["z", "z", "a", "a", "a", "m"]
    assert [joined.patients[i] for i in joined.patient] == ["p", "p", "q", "q", "q", "p"]
    assert joined.output[:, 0].tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.3, 0.1])


def test_labels_can_be_added_later(
    golden_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, fresh = (tmp_path / name for name in ("some", "out", "fresh"))
    folder.mkdir()
    for name in ("slide-000.svs", "slide-001.svs"):
        shutil.copy(golden_runs / "slides" / name, folder)
    trained = golden_runs / "run"
    assert len(predict(trained, folder, out=out).done) == 2
    tables = [out / "slides.csv", *(out / "patches").glob("*.csv")]
    assert {row["label"] for path in tables for row in csv_rows(path)} == {""}
    assert not (out / "evaluation.json").exists()
    assert "the training used 2 of these slides" in capsys.readouterr().err
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label,patient\nslide-000,normal,A\nslide-001,tumour,A\n")
    again = predict(trained, folder, out=out, labels=labels)
    assert (len(again.kept), again.done) == (2, ())
    assert [row["label"] for row in csv_rows(out / "slides.csv")] == ["normal", "tumour"]
    assert [row["patient"] for row in csv_rows(out / "patients.csv")] == ["A"]
    predict(trained, folder, out=fresh, labels=labels)
    assert (fresh / "evaluation.json").exists()
    for path in sorted(fresh.rglob("*.*")):
        assert path.read_bytes() == (out / path.relative_to(fresh)).read_bytes()


def test_failed_and_empty_slides_in_the_table(golden_runs: Path, tmp_path: Path) -> None:
    from tifffile import TiffWriter

    folder, out, trained = tmp_path / "some", tmp_path / "out", tmp_path / "run"
    folder.mkdir()
    for name in ("slide-000.svs", "slide-001.svs"):
        shutil.copy(golden_runs / "slides" / name, folder)
    shutil.copytree(golden_runs / "run", trained)
    text = (trained / "metrics.json").read_text()  # a run on patches with tissue
    (trained / "metrics.json").write_text(text.replace('"tissue": "none"', '"tissue": "otsu"'))
    with TiffWriter(folder / "blank.tiff") as file:
        white = np.full((1024, 1024, 3), 245, np.uint8)
        file.write(
            white, tile=(256, 256), photometric="rgb", resolution=(20_000, 20_000), resolutionunit=3
        )
    assert not predict(trained, folder, out=out).failed
    rows = {row["slide"]: row for row in csv_rows(out / "slides.csv")}
    assert set(rows) == {"blank", "slide-000", "slide-001"}
    blank = rows["blank"]
    assert (blank["patches"], blank["predicted"], blank["p_tumour"]) == ("0", "", "")
    (folder / "slide-001.svs").write_text("no slide any more")
    assert set(predict(trained, folder, out=out).failed) == {"slide-001"}
    assert {row["slide"] for row in csv_rows(out / "slides.csv")} == {"blank", "slide-000"}
    page = report(out).file.read_text()
    assert "Failed, and not predicted: slide-001." in page


def test_level_with_a_different_scale_fails(golden_runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(golden_runs / "run", tmp_path / "copy")
    metrics = json.loads((copy / "metrics.json").read_text())
    assert metrics["patch_mpp"] == pytest.approx(0.499)
    metrics["spec"] |= {"mpp": None, "level": 1}
    (copy / "metrics.json").write_text(json.dumps(metrics))
    result = predict(copy, golden_runs / "slides" / "slide-000.svs", out=tmp_path / "out")
    assert "the scale of its patches differs" in next(iter(result.failed.values()))
    before = files(copy)
    with pytest.raises(UsageError, match="holds files that are not predictions"):
        predict(copy, golden_runs / "slides" / "slide-000.svs", out=copy)
    assert files(copy) == before


def test_trained_on_ignores_patches_that_were_left_out(tmp_path: Path) -> None:
    def slide(name: str, sides: list[int]) -> SlideSplit:
        return SlideSplit(
            0, 0, name, "a", name, None, None, len(sides), 0, np.array(sides, np.int8)
        )

    slides = (
        slide("train", [0, 0]),
        slide("test", [2, -1]),
        slide("both", [2, 0]),
        slide("validation", [1, -1]),
    )
    write_splits(
        Splits("slide", 1, (0.7, 0.15, 0.15), ("x",), ("a",), slides), tmp_path / "splits.json"
    )
    assert trained_on(tmp_path / "splits.json") == {
        (kind, name) for kind in ("slide", "patient") for name in ("train", "both", "validation")
    }
    assert trained_on(tmp_path / "nothing.json") == set()


def test_slide_name_may_begin_with_part(tmp_path: Path) -> None:
    folder = PredictionsFolder(tmp_path)
    empty = np.zeros(0, np.int32)
    for name in ("part-x", "x"):
        description = PredictedSlide(
            slide=name,
            patient=name,
            label=None,
            width=9,
            height=9,
            bounds=[0, 0, 9, 9],
            mpp=None,
            mpp_source=None,
            size_l0=4.0,
            stride_l0=4.0,
            source="",
        )
        folder.write(
            description,
            class_predictions(
                ("a", "b"),
                (name,),
                (name,),
                slide=empty,
                patient=empty,
                x_l0=empty.astype(np.int64),
                y_l0=empty.astype(np.int64),
                label=empty,
                probability=np.zeros((0, 2), np.float32),
            ),
        )
    assert set(folder.slides()) == {"part-x", "x"}
    for name in folder.slides():
        assert len(folder.read(name).label) == 0


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
