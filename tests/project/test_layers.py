"""Test imports: packages import only packages of lower rank, and heavy libraries are imported only where listed."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from type_stubs import stubs

import histopipe

ROOT = Path(histopipe.__file__).parent

RANKS = {
    name: rank
    for rank, names in enumerate(
        [
            ["errors", "geometry", "_version"],
            ["system"],
            ["slides"],
            ["annotations"],
            ["tiling"],
            ["store"],
            ["tasks"],
            ["splits"],
            ["cohorts", "features"],
            ["dataset", "labels"],
            ["measure"],
            ["predictions"],
            ["evaluation"],
            ["ingestion"],
            ["maintenance"],
            ["pretrained"],
            ["runs"],
            ["training"],
            ["inference"],
            ["predicting"],
            ["search"],
            ["studies"],
            ["reports"],
            ["exporting", "viewer"],
            ["demo", "diagnostics"],
            ["cli"],
        ]
    )
    for name in names
}
HOMES = {
    "openslide": {"slides"},
    "pydicom": {"slides"},
    "tifffile": {"slides", "tiling", "predictions", "reports", "demo"},
    "lmdb": {"store"},
    "tensorflow": {"dataset", "training", "inference", "exporting", "diagnostics"},
    "keras": {"training", "inference", "reports"},
    "h5py": {"features", "ingestion"},
    "safetensors": {"pretrained"},
    "onnxruntime": {"inference", "tiling", "exporting"},
    "tf2onnx": {"exporting"},
    "anndata": {"exporting"},
    "mlflow": {"runs"},
    "pyarrow": {"exporting"},
    "optuna": {"search"},
    "distributed": {"system"},
    "dask_jobqueue": {"system"},
    "shapely": {"annotations", "measure", "tiling", "reports"},
    "cv2": {"tiling", "measure", "ingestion"},
    "defusedxml": {"annotations", "slides"},
    "fastslide": {"slides"},
    "matplotlib": {"reports"},
    "jinja2": {"reports"},
    "starlette": {"viewer"},
    "uvicorn": {"viewer"},
    "fsspec": {"system"},
    "aiohttp": {"system"},
}


WITHOUT_TENSORFLOW = {
    *(
        "errors",
        "geometry",
        "system",
        "slides",
        "annotations",
        "cohorts",
        "pretrained",
        "tiling",
        "store",
        "measure",
    ),
    *(
        "tasks",
        "splits",
        "predictions",
        "evaluation",
        "ingestion",
        "maintenance",
        "features",
        "runs",
        "search",
        "studies",
        "cli",
    ),
}
LONGEST_MODULE = 500
"""Maximum number of lines per module."""


def module_name(path: Path) -> str:
    """Return the module name of a file, such as `histopipe.store.reader`. `__init__` has the name of its package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def package(module: str) -> str:
    """Return the package of a module in histopipe, or "" for histopipe itself."""
    return module.removeprefix("histopipe").lstrip(".").split(".")[0]


@cache
def imports(module: str) -> frozenset[str]:
    """Return all modules that a module imports, except imports for type checkers only."""
    imported: set[str] = set()
    tree = ast.parse(MODULES[module].read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                imported.add(inner if inner in MODULES else base)
    return frozenset(imported)


def test_the_installed_package_is_tested() -> None:
    assert "site-packages" in ROOT.parts


def test_packages_import_lower_ranks_only_and_heavy_libraries_where_listed() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports(module)
        if package(module) not in HOMES.get(name.split(".")[0], {package(module)})
        or (
            package(module) not in ("", "__main__", package(name))
            and name.startswith("histopipe.")
            and RANKS[package(name)] >= RANKS[package(module)]
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    """Cycles within a package and by late imports are errors too."""
    sorter = TopologicalSorter({m: imports(m) & MODULES.keys() for m in MODULES if package(m)})
    sorter.prepare()  # raises CycleError with the names of the modules


def test_modules_are_short_and_have_no_name_of_a_public_function() -> None:
    """Importing such a module would replace the function."""
    assert not {package(module) for module in MODULES} & set(histopipe.__all__) - {"errors"}
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    long = {module: count for module, count in lines.items() if count > LONGEST_MODULE}
    assert not long


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.split())


def test_packages_without_tensorflow() -> None:
    """Every module of these packages can be imported without TensorFlow."""
    modules = [module for module in MODULES if package(module) in WITHOUT_TENSORFLOW]
    loaded = loaded_after(
        "import importlib, sys\n"
        "sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)"
    )
    assert set(modules) <= loaded


def test_importing_histopipe_and_help_load_no_heavy_library() -> None:
    code = (
        "import histopipe\n"
        "from histopipe.cli import COMMANDS, histopipe\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for words in ([], *([name] for name in COMMANDS)):\n"
        "        histopipe.main([*words, '--help'], standalone_mode=False)"
    )
    heavy = {"tensorflow", "keras", "openslide", "lmdb", "numpy", "tqdm"}
    slow = {"multiprocessing", "hashlib", "subprocess", "csv", "asyncio"}
    assert not loaded_after(code) & (heavy | slow)


def test_the_server_of_the_workers_of_an_ingest_imports_what_these_need() -> None:
    """Each start of an ingest waits for it."""
    loaded = loaded_after("import histopipe.ingestion.planning, histopipe.system.worker_process")
    packages = {name.split(".")[1] for name in loaded if name.startswith("histopipe.")}
    needed = {
        "annotations",
        "dataset",
        "ingestion",
        "measure",
        "slides",
        "store",
        "system",
        "tiling",
    }
    assert packages <= needed | {"errors", "geometry", "_version"}
    assert {name for name in loaded if name.startswith("histopipe.dataset.")} <= {
        "histopipe.dataset.stain_fit"
    }
    assert not loaded & {"scipy", "h5py", "matplotlib", "tifffile", "tensorflow"}


def test_types_of_public_names_are_generated() -> None:
    def parts(text: str) -> tuple[set[tuple[str, str, str]], list[str], list[str]]:
        body = ast.parse(text).body
        imports = [each for each in body if isinstance(each, ast.ImportFrom)]
        functions = [each for each in body if isinstance(each, ast.FunctionDef)]
        names = {(f"{i.module}", n.name, n.asname or "") for i in imports for n in i.names}
        return names, [ast.dump(each) for each in functions], [each.name for each in functions]

    imported, functions, names = parts((ROOT / "__init__.pyi").read_text())
    assert (imported, functions) == parts(stubs())[:2], "run tools/type_stubs.py"
    assert sorted(histopipe.__all__) == sorted([*names, *(n for _, _, n in imported if n)])
