"""Data flows one way: a package imports only packages of lower rank, and heavy libraries stay in their place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import histopipe

ROOT = Path(histopipe.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

RANKS = {
    name: rank
    for rank, names in enumerate(
        [
            ["errors", "geometry", "files", "_version"],
            ["slides"],
            ["annotations"],
            ["tiling"],
            ["store"],
            ["ingest"],
            ["dataset"],
            ["maintenance"],
            ["cluster"],
            ["features"],
            ["evaluation"],
            ["training"],
            ["embedding", "export", "studies"],
            ["prediction"],
            ["reports"],
            ["demo", "doctor"],
            ["cli"],
        ]
    )
    for name in names
}
HOMES = {
    "openslide": {"slides"},
    "pydicom": {"slides"},
    "tifffile": {"slides", "reports"},
    "lmdb": {"store"},
    "tensorflow": {"dataset", "training", "embedding", "reports"},
    "keras": {"dataset", "training", "embedding", "reports"},
    "h5py": {"features", "ingest"},
    "onnxruntime": {"embedding"},
    "pyarrow": {"export"},
    "optuna": {"studies"},
    "distributed": {"cluster"},
    "dask_jobqueue": {"cluster"},
    "shapely": {"annotations", "reports"},
    "defusedxml": {"annotations"},
    "matplotlib": {"reports"},
    "jinja2": {"reports"},
}


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def test_the_installed_package_is_tested() -> None:
    assert "site-packages" in ROOT.parts


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    here = package(path)
    if here in ("__init__", "__main__"):
        return  # the public names of all packages
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "histopipe" and rest:
            assert rest[0] in RANKS, f"{path}: {name} has no rank"
            assert rest[0] == here or RANKS[rest[0]] < RANKS[here], f"{path} imports {name}"
        if first in HOMES:
            assert here in HOMES[first], f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 320


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.split())


def test_importing_histopipe_loads_nothing_heavy() -> None:
    loaded = loaded_after("import histopipe")
    assert not loaded & {"tensorflow", "keras", "openslide", "lmdb", "numpy"}


def test_help_loads_nothing_heavy() -> None:
    code = (
        "from histopipe.cli import histopipe\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for words in (['--help'], ['ingest', '--help'], ['train', '--help'], ['info', '--help']):\n"
        "        histopipe.main(words, standalone_mode=False)"
    )
    assert not loaded_after(code) & {"tensorflow", "keras", "openslide", "lmdb", "numpy", "tqdm"}


def test_public_names() -> None:
    assert set(histopipe.__all__) == {
        "compact",
        "merge",
        "remove",
        "split",
        "verify",
        "HistopipeError",
        "Store",
        "StoreSet",
        "__version__",
        "annotate",
        "compare",
        "cross_validate",
        "embed",
        "heatmap",
        "load_dataset",
        "measure_quality",
        "open_store",
        "predict",
        "report",
        "train",
        "tune",
    }
    for name in histopipe.__all__:
        assert getattr(histopipe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = histopipe.nothing
