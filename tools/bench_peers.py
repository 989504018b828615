"""Compare histopipe with other tools: tiling slides, and reading patches for training.

    python tools/bench_peers.py FOLDER SLIDE... [--patches 256@0.5,224@0.5] [--rounds 5] [--tools NAME,NAME]

Each tool runs in a separate virtual environment in FOLDER/environments. If a tool cannot be installed, pip's last error
line is reported. `--patches` lists sizes in pixels with their mpp. Tools take turns, and medians are compared. Tools that accept coordinates get the coordinates of
histopipe's patches. Other tools choose their patches, so rates per patch are compared.

FOLDER/peers.json holds all results: versions, machine, command lines, and the output of each tool.
`--page docs/design/peers.md` and `--chart docs/images/peers.png` write the tables and the chart for the documentation.
Without slides, they are written from the existing FOLDER/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from environments import install
from matplotlib.figure import Figure

import histopipe
from histopipe.store.store import Store

PEERS = Path(__file__).parent / "peers"
WORKERS = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that tiles slides.

    Attributes:
        requirements: packages that pip installs; none for histopipe itself.
        program: file in tools/peers, called with the path of a job (JSON) and the output folder.
        patches: patches that the tool reads, for the table.
        output: format that the tool writes, for the table.
        without_dependencies: packages that pip installs without their dependencies.
    """

    requirements: tuple[str, ...]
    program: str
    patches: str
    output: str
    without_dependencies: tuple[str, ...] = ()


TOOLS = {
    "histopipe": Tool((), "", "tissue", "LMDB"),
    "OpenSlide + Pillow + LMDB": Tool(
        ("openslide-python==1.4.7", "openslide-bin==4.0.1.2", "pillow==13.0.0", "lmdb==3.0.0"),
        "openslide_pool.py",
        "the same",
        "LMDB",
    ),
    "tiatoolbox": Tool(("tiatoolbox==2.1.3",), "tiatoolbox_points.py", "the same", "JPEG files"),
    "pyvips dzsave": Tool(
        ("pyvips[binary]==3.2.0",), "pyvips_dzsave.py", "all of the slide", "JPEG files"
    ),
    # slideflow requires smac, whose dependency pyrfr does not compile with today's SWIG. Tiling does not need it. Its
    # TensorFlow backend needs Keras 2, so TensorFlow 2.15. Its PyTorch backend needs several GB of CUDA libraries.
    "slideflow": Tool(
        (
            "pyvips[binary]==3.2.0",
            "tensorflow-cpu==2.15.1",
            "numpy<2",
            "scipy",
            "scikit-learn",
            "scikit-image",
            "matplotlib",
            "imageio",
            "opencv-python-headless<4.12",
            "shapely",
            "pandas",
            "tqdm",
            "click",
            "crc32c",
            "tabulate",
            "rasterio",
            "rich",
            "pillow",
            "requests",
            "parameterized",
            "zarr<3",
            "gdown",
            "pyarrow",
            "fpdf2",
            "seaborn",
            "tensorboard",
            "umap-learn",
            "tensorflow-datasets",
        ),
        "slideflow_tiles.py",
        "its own tissue",
        "TFRecords",
        without_dependencies=("slideflow==3.0.2",),
    ),
    "hs2p": Tool(
        ("hs2p==6.1.0", "openslide-python==1.4.7", "openslide-bin==4.0.1.2", "pyturbojpeg==1.8.3"),
        "hs2p_tiles.py",
        "its own tissue",
        "tar files of JPEG",
    ),
    "ratiopath": Tool(
        ("ratiopath==1.0.3", "openslide-bin==4.0.1.2"),
        "ratiopath_tiles.py",
        "the same",
        "Parquet files of JPEG",
    ),
    "wsi-patching": Tool(
        ("wsi-patching==0.5.5", "torch==2.13.0"),
        "wsi_patching_tiles.py",
        "its own tissue",
        "tar files of PNG",
    ),
    "slide2vec": Tool(
        ("slide2vec==7.1.4", "torch==2.10.0", "torchvision==0.25.0"),
        "slide2vec_tiles.py",
        "its own tissue",
        "nothing is written",
    ),
    "LazySlide": Tool(
        ("lazyslide==0.13.0", "torch==2.10.0", "torchvision==0.25.0"),
        "lazyslide_tiles.py",
        "its own tissue",
        "nothing is written",
    ),
    "microtome-wsi": Tool(
        ("microtome-wsi==0.1.0",), "microtome_tiles.py", "the same", "nothing is written"
    ),
    # atlas-patch finds tissue with SAM2: a package and weights that it loads from the internet.
    "atlas-patch": Tool(
        ("atlas-patch==1.1.0", "openslide-bin==4.0.1.2", "torch==2.10.0", "torchvision==0.25.0"),
        "atlas_patch_tiles.py",
        "its own tissue",
        "PNG files",
    ),
}


@dataclass(frozen=True, slots=True)
class Patches:
    """Patches to tile: side in pixels, and scale in µm per pixel."""

    size: int
    mpp: float

    def __str__(self) -> str:
        return f"{self.size} px at {self.mpp:g} mpp"

    @classmethod
    def parse(cls, text: str) -> list[Patches]:
        """Parse a list such as `256@0.5,224@0.5`."""
        parts = [part.split("@") for part in text.split(",")]
        return [cls(int(size), float(mpp)) for size, mpp in parts]


@dataclass(slots=True)
class Measured:
    """Measurements of a tool.

    Attributes:
        error: reason why the tool could not be installed or run.
        versions: versions of the required packages in its environment.
        command: command line of one run.
        patches, output_bytes: number of patches and bytes that a run wrote.
        start_seconds: median duration of a run without slides: the start of Python, and imports.
        seconds: duration of each run, from the start of the command until its output is on the disk.
        peak_mb: peak memory of a process, over all runs.
    """

    error: str | None = None
    versions: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    patches: int = 0
    output_bytes: int = 0
    start_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    @property
    def rate(self) -> float:
        """Median patches per second."""
        return self.patches / statistics.median(self.seconds)


def main() -> None:
    """Measure the tools, and write the results."""
    options = _parse()
    file: Path = options.folder / "peers.json"
    if options.slides:
        options.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measure(options), indent=1))
    results = json.loads(file.read_text())
    print(page(results))
    if options.page:
        options.page.write_text(page(results))
    if options.chart:
        draw(results, options.chart)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Install the tools, run them in turns, and return all results."""
    folder: Path = options.folder
    slides = [path.resolve() for path in options.slides]
    environments = {name: _install(folder, name) for name in options.tools}
    for name, measurement in environments.items():
        if measurement.error is None:
            measurement.start_seconds = _start_seconds(folder, name)
    tiling: dict[str, dict[str, Any]] = {}
    for patches in options.patches:
        job = _job(folder, slides, patches)
        measured = {
            name: Measured(
                measurement.error, measurement.versions, start_seconds=measurement.start_seconds
            )
            for name, measurement in environments.items()
        }
        for number in range(options.rounds + 1):
            for name, measurement in measured.items():
                if measurement.error is None:
                    _run(folder, name, measurement, job, warm_up=number == 0)
        tiling[str(patches)] = {name: asdict(measurement) for name, measurement in measured.items()}
    store = _store(folder, options.patches[0])
    return {
        "machine": f"{WORKERS} cores ({_processor()}), Linux {platform.release()}",
        "python": platform.python_version(),
        "histopipe": histopipe.__version__,
        "slides": [f"{path.name} ({path.stat().st_size / 1e6:,.0f} MB)" for path in slides],
        "note": options.note,
        "rounds": options.rounds,
        "tiling": tiling,
        "reading": {} if options.skip_reading else _reading(folder, store),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare histopipe with other tools.")
    parser.add_argument(
        "folder", type=lambda text: Path(text).resolve(), help="environments, outputs and results"
    )
    parser.add_argument("slides", type=Path, nargs="*")
    parser.add_argument("--patches", type=Patches.parse, default="256@0.5,224@0.5")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one warm-up round")
    parser.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    parser.add_argument("--skip-reading", action="store_true")
    parser.add_argument("--note", default="", help="remark on the slides, for the page")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--chart", type=Path)
    return parser.parse_args()


def _store(folder: Path, patches: Patches) -> Path:
    return folder / f"patches-{patches.size}-{patches.mpp:g}.lmdb"


def _job(folder: Path, slides: list[Path], patches: Patches) -> Path:
    """Ingest once, and write the coordinates of the patches for the other tools."""
    store = _store(folder, patches)
    shutil.rmtree(store, ignore_errors=True)
    histopipe.ingest(slides, store, patch_size=patches.size, mpp=patches.mpp)
    entries = []
    with Store(store) as opened:
        for number, record in opened.complete.items():
            index = opened.index(number)
            entries.append(
                {
                    "path": record.resolved_path,
                    "level": record.level,
                    "downsample": record.downsample,
                    "read_size": record.read_size,
                    "slide_mpp": record.mpp,
                    "patch_mpp": record.patch_mpp,
                    "x_l0": index["x_l0"].tolist(),
                    "y_l0": index["y_l0"].tolist(),
                }
            )
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "slides": entries,
                "patch_size": patches.size,
                "mpp": patches.mpp,
                "workers": WORKERS,
            }
        )
    )
    return job


def _install(folder: Path, name: str) -> Measured:
    """Create the environment of a tool, unless it exists. Return its versions, or the error."""
    tool = TOOLS[name]
    if not tool.requirements:
        return Measured(versions=[f"histopipe=={histopipe.__version__}"])
    steps = [list(tool.requirements)]
    if tool.without_dependencies:
        steps.append(["--no-deps", *tool.without_dependencies])
    error, versions = install(folder / "environments" / name.split(maxsplit=1)[0], steps)
    return Measured(error, versions)


def _command(folder: Path, name: str, job: Path, out: Path) -> list[str]:
    """Return the command line that tiles the slides of a job."""
    if name != "histopipe":
        python = folder / "environments" / name.split(maxsplit=1)[0] / "bin" / "python"
        return [str(python), str(PEERS / TOOLS[name].program), str(job), str(out)]
    settings = json.loads(job.read_text())
    paths = [slide["path"] for slide in settings["slides"]] or [str(out)]
    return [
        str(Path(sys.executable).with_name("histopipe")),
        "ingest",
        *paths,
        "--out",
        str(out / "patches.lmdb"),
        "--patch-size",
        str(settings["patch_size"]),
        "--mpp",
        str(settings["mpp"]),
    ]


def _start_seconds(folder: Path, name: str) -> float:
    """Measure the duration of a run without slides."""
    job, out = folder / "empty.json", folder / "output"
    job.write_text(json.dumps({"slides": [], "patch_size": 256, "mpp": 0.5, "workers": WORKERS}))
    out.mkdir(exist_ok=True)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        subprocess.run(
            _command(folder, name, job, out), capture_output=True, check=False, cwd=folder
        )
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def _run(folder: Path, name: str, measurement: Measured, job: Path, *, warm_up: bool) -> None:
    """Run a tool once, as a command with an empty output folder."""
    out = folder / "output"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    measurement.command = _command(folder, name, job, out)
    log = folder / f"{name.split(maxsplit=1)[0]}.log"
    os.sync()
    begun = time.perf_counter()
    with log.open("w") as file, log.with_suffix(".out").open("w") as printed:
        process = subprocess.Popen(measurement.command, stdout=printed, stderr=file, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()  # the time includes writing the output to the disk
    seconds = time.perf_counter() - begun
    if process.returncode:
        measurement.error = (
            f"exit code {process.returncode}: {log.read_text().strip().splitlines()[-1:]}"
        )
        return
    print(f"{name}: {seconds:.2f} s{' (warm-up)' if warm_up else ''}", file=sys.stderr)
    if warm_up:
        return
    measurement.seconds.append(seconds)
    measurement.peak_mb = max(measurement.peak_mb, usage.ru_maxrss / 1024)
    measurement.output_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    measurement.patches = _count(name, job, log)


def _count(name: str, job: Path, log: Path) -> int:
    """Return the number of patches that a run has written. The programs print it last."""
    if name == "histopipe":
        return sum(len(slide["x_l0"]) for slide in json.loads(job.read_text())["slides"])
    return int(log.with_suffix(".out").read_text().split()[-1])


def _reading(folder: Path, store: Path) -> dict[str, float]:
    """Measure the input rate of a training in patches per second, from three formats of the same patches."""
    command = [sys.executable, str(PEERS / "read_formats.py"), str(store), str(folder)]
    text = subprocess.check_output(command, text=True)
    rates: dict[str, float] = json.loads(text.splitlines()[-1])
    return rates


def tiling_table(measured: dict[str, Measured]) -> list[str]:
    """Return a Markdown table. The ratio is histopipe's rate divided by the rate of the tool."""
    ours = measured["histopipe"].rate
    lines = [
        "| tool | patches | output | seconds, median (min to max) | of these, start | patches/s | histopipe is | peak MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, measurement in measured.items():
        tool = TOOLS[name]
        if measurement.error:
            lines.append(f"| {name} | not measured: {measurement.error} | | | | | | |")
            continue
        middle, low, high = (
            statistics.median(measurement.seconds),
            min(measurement.seconds),
            max(measurement.seconds),
        )
        lines.append(
            f"| {name} | {measurement.patches:,}, {tool.patches} | {tool.output}, {measurement.output_bytes / 1e6:,.0f} MB "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {measurement.start_seconds:.2f} | {measurement.rate:,.0f} "
            f"| {ours / measurement.rate:.1f}× | {measurement.peak_mb:,.0f} |"
        )
    return lines


def reading_table(reading: dict[str, float]) -> list[str]:
    """Return a Markdown table of the formats that a training reads."""
    lines = ["| reader | patches/s | histopipe is |", "| --- | --- | --- |"]
    for name, rate in reading.items():
        lines.append(f"| {name} | {rate:,.0f} | {reading['histopipe'] / rate:.2f}× |")
    return lines if reading else ["Not measured."]


def _measured(results: dict[str, Any]) -> dict[str, dict[str, Measured]]:
    """Return the measurements by patches and tool."""
    return {
        patches: {name: Measured(**values) for name, values in tools.items()}
        for patches, tools in results["tiling"].items()
    }


def page(results: dict[str, Any]) -> str:
    """Return the page of the documentation."""
    tiling = _measured(results)
    lines = [
        "# Comparison with other tools",
        "",
        "How fast histopipe and other tools tile the same slides, and how fast a training reads the patches.",
        "",
        "![Patches per second of each tool](../images/peers.png)",
        "",
        "| | |",
        "| --- | --- |",
        f"| measured by | `tools/bench_peers.py`, histopipe {results['histopipe']}, Python {results['python']} |",
        f"| machine | {results['machine']} |",
        f"| slides | {', '.join(results['slides'])}. {results['note']} |",
        f"| runs | tools took turns in {results['rounds']} rounds after a warm-up round |",
        "| seconds | a whole command, until its output is on the disk; *start* is a run without slides |",
        "| peak MB | peak memory of the main process, without its workers |",
        "| the same | the tool gets the coordinates of histopipe's patches |",
        "",
        "The other tools choose their patches, so compare patches per second. histopipe also finds the tissue,",
        "compares samples with OpenSlide, and stores a checksum of each patch. The script does none of these.",
    ]
    for patches, measured in tiling.items():
        lines += ["", f"## Tiling, {patches}", "", *tiling_table(measured)]
    lines += [
        "",
        "## Reading",
        "",
        "Shuffled batches of the same patches for a training. The readers took turns in one process.",
        "",
        *reading_table(results["reading"]),
        "",
        "## Versions",
        "",
        "| tool | versions | command |",
        "| --- | --- | --- |",
    ]
    for name, measurement in next(iter(tiling.values())).items():
        program = (
            f"tools/peers/{TOOLS[name].program}" if TOOLS[name].program else "histopipe ingest"
        )
        lines.append(f"| {name} | {', '.join(measurement.versions) or '-'} | `{program}` |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the tables as bars."""
    mpl.rcParams["font.size"] = 9
    panels = [
        (
            f"tiling, {patches}",
            {
                name: measurement.rate
                for name, measurement in tools.items()
                if not measurement.error
            },
        )
        for patches, tools in _measured(results).items()
    ]
    if results["reading"]:
        panels.append(("reading for training", results["reading"]))
    figure = Figure(figsize=(3.7 * len(panels), 2.1), layout="constrained")
    figure.suptitle("patches per second", x=0.004, ha="left", fontsize=9)
    for number, (title, values) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        names = list(values)[::-1]
        colours = ["#2a6f97" if name == "histopipe" else "#b8c4cc" for name in names]
        bars = axes.barh(names, [values[name] for name in names], color=colours)
        axes.bar_label(bars, [f"{values[name]:,.0f}" for name in names], padding=3)
        axes.margins(x=0.25)
        axes.set_title(title, fontsize=9, fontweight="bold")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.xaxis.set_visible(False)
        axes.tick_params(left=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
