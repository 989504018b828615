"""Parts of a command in one folder: together, they write what one process writes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import histopipe
from helpers.commands import run_command, succeed
from helpers.examples import examples
from helpers.networks import DIMENSION, replace_networks
from helpers.results import files
from helpers.stores import a_store, flip_a_byte, jpegs
from histopipe.errors import UsageError
from histopipe.features.feature_file import feature_files, feature_path
from histopipe.system.shared_folders import divide

NETWORK: dict[str, Any] = {"model": "small-cnn", "batch_size": 16}
TILING: dict[str, Any] = {"patch_size": 64, "mpp": 0.5, "tissue": "none"}
SLIDES = {"n1": 1, "t1": 2, "n2": 3, "t2": 4}
"""Patches of the slides of `small`."""
DAMAGED = "t1"
TABLES = {"features.json", "predict.json", "slides.csv", "masks.csv", "export.json", "index.html"}
Compute = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("numpy_networks")


@pytest.fixture(scope="module")
def slides(golden_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five slides, of which one is damaged."""
    folder = tmp_path_factory.mktemp("slides")
    for number in range(4):
        shutil.copy(golden_runs / "slides" / f"slide-{number:03}.svs", folder)
    (folder / "bad.svs").write_bytes(b"no slide")
    return folder


@pytest.fixture(
    params=[
        "slides",
        "patches",
        "bags",
        "tissue",
        "webdataset",
        "folder",
        "masks",
    ]
)
def compute(
    request: pytest.FixtureRequest,
    slides: Path,
    golden_runs: Path,
    slide_model: Path,
    tmp_path: Path,
) -> Compute:
    """Return a function that runs a command with `out` and options."""
    store, kind = golden_runs / "store.lmdb", request.param
    if kind == "masks":
        store = tmp_path / "with-masks.lmdb"
        histopipe.ingest(slides, store, patch_size=64)
    commands: dict[str, tuple[Compute, tuple[Any, ...], dict[str, Any]]] = {
        "slides": (histopipe.embed, (slides,), {**NETWORK, **TILING}),
        "patches": (histopipe.predict, (golden_runs / "run", store), {}),
        "bags": (histopipe.predict, (slide_model / "run", slides), {}),
        "tissue": (histopipe.tissue, (slides,), {}),
    }
    export = histopipe.export, (store,), {"to": kind, "shard_patches": 20}
    command, arguments, options = commands.get(kind, export)
    return lambda **further: command(*arguments, **options, **further)


def test_parts_write_what_one_process_writes(compute: Compute, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole" / "out", tmp_path / "divided" / "out"
    expected = compute(out=whole)
    results = [compute(out=parts, part="3/3")]
    assert not TABLES & {path.name for path in parts.iterdir()}
    with pytest.raises(UsageError, match=r"is not done: found no part did it, expected with --jo"):
        compute(out=parts, join=True)
    for journal in parts.rglob("parts/3-of-3/journal"):
        journal.unlink()  # as of a part that was killed
    with pytest.raises(UsageError, match=r"parts that have not ended: 3-of-3"):
        compute(out=parts, join=True)
    results += [compute(out=parts, part=f"{number}/3") for number in (1, 2)]
    again = compute(out=parts, part="3/3")
    for _ in range(2):  # twice is harmless
        joined = compute(out=parts, join=True)
        assert files(parts) == files(whole)
        assert joined.failed == expected.failed
    if not hasattr(expected, "slides"):  # the masks are written again
        assert sum(result.patches for result in results) == expected.patches > 0
        assert again.patches == 0
    assert again.failed == results[0].failed


def refuse(message: str, folder: Path, command: Callable[[], object]) -> None:
    """Check that a command is refused, and changes no file. A join may record the settings of the parts."""
    before = files(folder)
    with pytest.raises(UsageError, match=message):
        command()
    added = (
        {} if "features.json" in before else {"features.json": files(folder).get("features.json")}
    )
    assert files(folder) in (before, before | added)


NUMBERS = st.integers(1, 3).flatmap(lambda count: st.tuples(st.integers(1, count), st.just(count)))
STEPS = st.one_of(
    NUMBERS.map(lambda part: ("part", *part)),
    st.sampled_from([("join",), ("plain",), ("other",), ("kill",), ("lose",)]),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A store of four slides, of which one is damaged, and the files that one process writes."""
    folder = tmp_path_factory.mktemp("small")
    patches = {slide: jpegs(9 * i, count) for i, (slide, count) in enumerate(SLIDES.items())}
    store = a_store(folder / "s.lmdb", patches)
    flip_a_byte(store, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        replace_networks(patch)
        assert list(histopipe.embed(store, out=folder / "whole", **NETWORK).failed) == [DAMAGED]
    return store, files(folder / "whole")


@given(st.lists(STEPS, min_size=3, max_size=8))
@settings(examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_joins_and_plain_commands_in_any_order(
    small: tuple[Path, dict[str, bytes]], steps: list[tuple[Any, ...]]
) -> None:
    """A join writes what one process writes, or is refused. Parts compute what is missing of theirs, and no more."""
    (store, expected), whole = small, set(SLIDES) - {DAMAGED}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"

        def embed(**options: Any) -> Any:
            return histopipe.embed(store, out=out, **{**NETWORK, **options})

        for step, *part in (*steps, ("plain",)):
            journals = list(out.rglob("journal"))
            failed = {name for path in journals for name in json.loads(path.read_text())["failed"]}
            done = set(feature_files(out)) if out.exists() else set()
            if step == "part":
                number, count = part
                result, mine = embed(part=f"{number}/{count}"), {*divide(SLIDES, count)[number - 1]}
                assert set(result.done) == (whole - done) & mine
                assert set(result.failed) == {DAMAGED} & mine
            elif step == "plain":
                assert set(embed().done) == whole - done
                assert files(out) == expected
            elif step == "join" and not (out / "parts").exists():
                refuse("has no parts to join", out, lambda: embed(join=True))
            elif step == "join" and SLIDES.keys() - done - failed:
                refuse("is not done", out, lambda: embed(join=True))
            elif step == "join":
                assert not embed(join=True).done
                assert files(out) == expected
            elif step == "other" and list(out.rglob("features.json")):
                refuse("other settings", out, lambda: embed(part="1/2", dtype="float16"))
            elif step == "kill" and journals:
                journals[-1].unlink()
            elif step == "lose" and done:
                feature_path(out, max(done)).unlink()


def test_plans_show_what_parts_do(
    slides: Path, golden_runs: Path, slide_model: Path, tmp_path: Path
) -> None:
    run, store, masks = golden_runs / "run", golden_runs / "store.lmdb", tmp_path / "masks"
    plan = histopipe.plan_parts(store, part="1/2")
    assert (plan.unit, len(plan.parts)) == ("patches", 2)
    for number, (names, work) in enumerate(zip(plan.parts, plan.work, strict=True), 1):
        result: Any = histopipe.predict(run, store, out=tmp_path / "p", part=f"{number}/2")
        assert (set(result.done), result.patches) == (set(names), work)
    plan = histopipe.plan_parts(slides, part="2/3")
    assert plan.unit == "bytes"
    assert sum(plan.work) == sum(path.stat().st_size for path in slides.glob("*.svs"))
    done = {"bad"}
    for number, names in enumerate(plan.parts, 1):
        histopipe.tissue(slides, out=masks, part=f"{number}/3")
        done |= {Path(name).stem for name in names}
        assert {path.stem.split(".")[0] for path in masks.glob("*.png")} == done - {"bad"}
    with pytest.raises(UsageError, match="--plan: found features"):
        histopipe.plan_parts(slide_model / "features")
    with pytest.raises(UsageError, match="features: found an option of several machines"):
        histopipe.predict(slide_model / "run", slide_model / "features", out="x", part="1/2")


def test_a_plan_of_embed_measures_some_batches_and_writes_nothing(
    slides: Path, golden_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = SimpleNamespace(peak_bytes=lambda: (1 << 30, None))
    monkeypatch.setattr("histopipe.inference.plans.load_quietly", lambda _: devices)
    store, out = golden_runs / "store.lmdb", tmp_path / "{model}"
    of_store = histopipe.plan_embed(store, out=out, part="1/2", **NETWORK)
    assert not list(tmp_path.iterdir())
    parts = [histopipe.embed(store, out=out.parent, part=f"{i}/2", **NETWORK) for i in (1, 2)]
    assert of_store.work == tuple(result.patches for result in parts)
    assert of_store.patches == sum(of_store.work)
    assert (of_store.unit, of_store.batch_size, of_store.host_bytes) == ("patches", 16, 1 << 30)
    assert 0 < of_store.measured <= of_store.patches and of_store.seconds > 0
    assert of_store.feature_bytes == 4 * DIMENSION * of_store.patches
    assert sum(of_store.shares.values()) == pytest.approx(1, abs=0.01)
    options = {**NETWORK, **TILING, "batch_size": 4}
    plan = histopipe.plan_embed(slides / "slide-001.svs", out=out, **options)
    assert (plan.unit, len(plan.parts), plan.measured, plan.patches) == ("bytes", 1, 5 * 4, 35)
    assert plan.host_bytes > 1 << 30  # with the workers


def test_damaged_patches_of_all_parts_are_joined(tmp_path: Path) -> None:
    store = a_store(tmp_path / "s.lmdb", {name: jpegs(0, 4) for name in "abc"})
    flip_a_byte(store, 1, 2)
    whole: Any = histopipe.export(store, to="folder", out=tmp_path / "whole")
    assert whole.exit_code == 3 and len(whole.damaged) == 1
    assert "skipped: b: patch 2: does not match its checksum" in str(whole)
    for number in (1, 2):
        histopipe.export(store, to="folder", out=tmp_path / "parts", part=f"{number}/2")
    joined: Any = histopipe.export(store, to="folder", out=tmp_path / "parts", join=True)
    assert joined.damaged == whole.damaged
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert sum(name.endswith(".jpg") for name in files(tmp_path / "whole")) == 11


def test_join_removes_no_features_of_slides_that_are_copies(slides: Path, tmp_path: Path) -> None:
    """Each machine may have a copy of the slides, with the time of the copy."""
    copies, options = tmp_path / "slides", {"out": tmp_path / "features", **NETWORK, **TILING}
    shutil.copytree(slides, copies)
    for number in (1, 2):
        histopipe.embed(copies, part=f"{number}/2", **options)
    before = files(options["out"])
    for path in copies.glob("*.svs"):
        os.utime(path, (1, 1))
    with pytest.raises(UsageError, match="is not done: found no part did it"):
        histopipe.embed(copies, join=True, **options)
    assert before.items() <= files(options["out"]).items() and len(before) == 4


def test_plans_of_several_slides_per_file_are_refused(golden_runs: Path) -> None:
    rest = (golden_runs / "store.lmdb", "--out", "x", "--plan")
    for flags in (("--to", "webdataset"), ("--index", "csv")):
        done = run_command("export", *rest, *flags)
        assert done.returncode == 2 and "expected a file per slide" in done.stderr
    assert json.loads(succeed("export", *rest, "--to", "folder", "--json"))["unit"] == "patches"
    assert succeed("predict", "RUN", *rest).startswith("part 1/1")
