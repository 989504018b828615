"""What `--plan` shows: how slides are divided into parts, and how long `embed` takes."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from histopipe.dataset.selection import select
from histopipe.errors import UsageError
from histopipe.inference.embed import read_options, run_encoders
from histopipe.inference.options import EmbedOptions, encoder_name
from histopipe.inference.stored_slides import patch_counts, read_sources
from histopipe.ingestion.options import EMBED_SETTINGS
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import file_sizes
from histopipe.store.store import Store
from histopipe.system.forecast import bottleneck, spelled
from histopipe.system.output import Progress, default_progress
from histopipe.system.parts import PartOptions
from histopipe.system.settings import declared_settings, takes
from histopipe.system.shared_folders import PartsPlan, Sample
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import count_usable_cores


def plan_parts(
    sources: str | Path | Sequence[str | Path], *, part: str | None = None, images: bool = False
) -> PartsPlan:
    """Show how `predict`, `tissue` and `export` divide slides into parts.

    Args:
        sources: stores, or slide files, folders and URLs.
        part: `I/N`, `slurm/N` or `kubernetes/N`, as of the command; one part if None.
        images: take only images.

    Returns:
        The slides and the work of each part: patches of stores, bytes of slide files.

    Raises:
        UsageError, NothingToDo: as for these commands.
    """
    share, (paths, kind) = PartOptions(part=part).share, read_sources(sources)
    if kind == "features":
        raise UsageError("--plan", found="features", expected="stores or slides")
    if kind == "slides":
        return PartsPlan.of(file_sizes(discover(paths, images=images)), share.count, "bytes")
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(path)) for path in paths]
        return PartsPlan.of(patch_counts(stores, select(stores)), share.count, "patches")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class EmbedPlan(PartsPlan):
    """Forecast of `embed`.

    Attributes:
        patches: number of patches of all slides; of slide files, an estimate.
        measured: number of patches that were measured.
        seconds: time for all slides in one process.
        batch_size: patches per batch: the fastest, unless one was chosen.
        feature_bytes, free_bytes: size of all feature files, and free space on their disk.
        host_bytes, gpu_bytes: peak memory; None without a GPU.
        shares: share of each stage in the measured time, the largest first.
    """

    patches: int
    measured: int
    seconds: float
    batch_size: int
    feature_bytes: int
    free_bytes: int
    host_bytes: int
    gpu_bytes: int | None
    shares: Mapping[str, float]

    def __str__(self) -> str:
        gpu = "" if self.gpu_bytes is None else f", {self.gpu_bytes / 1e9:.1f} GB on the GPU"
        count = len(self.parts)
        divided = (
            f", {spelled(self.seconds * max(self.work) / sum(self.work))} in {count} parts"
            * (count > 1)
        )
        return "\n".join(
            [
                PartsPlan.__str__(self),
                f"about {self.patches:,} patches: {spelled(self.seconds)} in one process{divided}, "
                f"after {self.measured:,} patches on this machine",
                f"{bottleneck(self.shares)}; batches of {self.batch_size}",
                f"features: {self.feature_bytes / 1e9:,.2f} GB, {self.free_bytes / 1e9:,.0f} GB free; "
                f"memory: {self.host_bytes / 1e9:.1f} GB{gpu}",
            ]
        )


@takes(declared_settings(EmbedOptions), EMBED_SETTINGS)
def plan_embed(
    sources: str | Path | Sequence[str | Path] = "patches.lmdb",
    *,
    out: str | Path,
    progress: Progress | None = None,
    **settings: Any,
) -> EmbedPlan:
    """Embed the first batches of some slides into a temporary folder, and forecast how long all slides take.

    Args:
        sources, out, progress: as for `embed`.
        settings: options of `embed`. Without a batch size, the fastest is found.

    Returns:
        The parts, time, memory and disk.

    Raises:
        UsageError, NothingToDo, MachineShort: as for `embed`.

    Example:
        >>> plan_embed("slides", out="features", model="resnet50").seconds  # doctest: +SKIP
    """
    options, tiling = read_options({"batch_size": "auto", **settings})
    sample, display = Sample(), progress or default_progress()
    with TemporaryDirectory(prefix="histopipe-plan-") as scratch:
        names = [encoder_name(each.encoder) for each in options.of_encoders()]
        target = Path(scratch) / ("{model}" if len(names) > 1 else "features")
        run, folders = run_encoders(
            sources, target, replace(options, part=None), tiling, share=sample, progress=display
        )
    if not run.done:
        raise UsageError("--plan", found=next(iter(run.failed.values()), "no patch"))
    work, parent = sample.work, Path(out).absolute()
    patches = round(run.outlook.total_of(sum(work.values())))
    dimension = sum(folder.encoder.dimension for folder in folders.folders)
    host, gpu = load_quietly("histopipe.training.devices").peak_bytes()
    # Workers that tile slides have ended. The largest child shows the memory of each.
    workers = 0 if patches == sum(work.values()) else tiling.get("workers") or count_usable_cores()
    host += workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return EmbedPlan.of(
        work,
        options.share.count,
        "patches" if patches == sum(work.values()) else "bytes",
        patches=patches,
        measured=run.outlook.done,
        seconds=run.outlook.seconds_of(patches, len(work)),
        batch_size=folders.network.batch_size,
        feature_bytes=patches * dimension * (2 if options.dtype == "float16" else 4),
        free_bytes=shutil.disk_usage(next(p for p in (parent, *parent.parents) if p.exists())).free,
        host_bytes=host,
        gpu_bytes=gpu,
        shares=run.shares,
    )
