"""Show the contents of a store, or of a folder of parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.maintenance.verify import check_untrusted
from histopipe.store.format import VERSION
from histopipe.store.store import Store, opened_parts, parts_of
from histopipe.system.folders import DATA
from histopipe.system.output import Progress, Result


@dataclass(frozen=True, slots=True, repr=False)
class StoreInfo(Result):
    """The contents of a store.

    Attributes:
        path: path of the store.
        version: version of its format.
        uuid, created: identifier, and time of creation in ISO 8601; of parts, all identifiers and the newest time.
        spec: tiling settings of its patches.
        patches, unreadable, patch_bytes: totals of complete slides; bytes of the patches' files.
        file_bytes: disk space of data.mdb.
        states: number of slides by state.
        labels, mpp_sources, routes: number of complete slides by label, source of the scale, and route.
        patch_labels: number of patches by class of the annotations.
        slides: slide records, as JSON.
    """

    path: str
    version: int
    uuid: str
    created: str
    spec: dict[str, Any]
    patches: int
    unreadable: int
    patch_bytes: int
    file_bytes: int
    states: dict[str, int]
    labels: dict[str, int]
    patch_labels: dict[str, int]
    mpp_sources: dict[str, int]
    routes: dict[str, int]
    slides: list[dict[str, Any]]

    @property
    def then(self) -> tuple[str, ...]:
        """The next useful command: ingest slides, or train on the labels that exist."""
        if not self.patches:
            return "ingest", "SLIDES", "--out", self.path
        if set(self.labels) != {"unlabelled"}:
            return "train", self.path
        if self.patch_labels:
            return "train", self.path, "--labels-from", "annotation"
        return "train", self.path, "--labels", "labels.csv"

    def __str__(self) -> str:
        spec = self.spec
        scale = f"{spec['mpp']:g} mpp" if spec["mpp"] else f"level {spec['level']}"
        return "\n".join(
            [
                f"{self.path}  (format {self.version}, created {self.created})",
                f"patches   {self.patches:,} of {spec['patch_size']}² at {scale}, overlap {spec['overlap']}, "
                f"{'edge ' * ('edge' in spec)}{spec.get('edge', '')}{', ' * ('edge' in spec)}"
                f"{spec['codec']}, {self.patch_bytes / 1e6:,.1f} MB ({self.file_bytes / 1e6:,.1f} MB on disk)",
                f"tissue    {spec['tissue']}, at least {spec['tissue_threshold']:g}",
                "slides    " + _counts(self.states),
                "labels    " + _counts(self.labels),
                "patch labels  " + _counts(self.patch_labels),
                "mpp source  " + _counts(self.mpp_sources),
                "routes    " + _counts(self.routes),
                f"unreadable patches  {self.unreadable}",
                "",
                f"{'slide':<40} {'state':<9} {'patches':>9} {'mpp':>8}  {'label':<12} {'route':<9} reason, notes",
                *map(_slide_line, self.slides),
            ]
        )


def store_info(
    store: str | Path, *, untrusted: bool = False, progress: Progress | None = None
) -> StoreInfo:
    """Show the contents of a store: slides by state, patches, bytes, scales, labels and settings.

    Args:
        store: the store's folder, or a folder of parts.
        untrusted: verify the store before LMDB opens it.
        progress: where to show the progress of `untrusted`.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion: it cannot be read.

    Example:
        >>> store_info("patches.lmdb").patches  # doctest: +SKIP
        1204
    """
    for path in parts_of(Path(store)) if untrusted else ():
        check_untrusted(path, progress=progress)
    with opened_parts(Path(store)) as stores:
        return info_of(stores, Path(store))


def info_of(stores: Sequence[Store], path: Path) -> StoreInfo:
    """Return the contents of an open store, or of all stores of the folder of parts `path`."""
    records = [record for store in stores for record in store.slides]
    complete = [record for store in stores for record in store.complete.values()]
    patch_labels: Counter[str] = Counter()
    for record in complete:
        patch_labels.update(record.patch_labels)
    return StoreInfo(
        path=str(path),
        version=VERSION,
        uuid="+".join(store.uuid for store in stores),
        created=max(store.created for store in stores),
        spec=dict(stores[0].spec),
        patches=sum(map(len, stores)),
        unreadable=sum(record.unreadable for record in complete),
        patch_bytes=sum(record.stored_bytes for record in complete),
        file_bytes=sum((store.path / DATA).stat().st_blocks * 512 for store in stores),
        states=dict(Counter(str(record.state) for record in records)),
        labels=dict(Counter(record.label or "unlabelled" for record in complete)),
        patch_labels=dict(patch_labels),
        mpp_sources=dict(Counter(record.mpp_source or "unknown" for record in complete)),
        routes=dict(Counter(record.route or "none" for record in complete)),
        slides=[record.to_json() for record in records],
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _slide_line(slide: Mapping[str, Any]) -> str:
    mpp = f"{slide['mpp']:.4g}" if slide["mpp"] else "-"
    notes = [slide["error"] or slide["route_reason"], *slide["notes"], *slide["annotation_notes"]]
    return (
        f"{slide['id']:<40} {slide['state']:<9} {slide['stored']:>9,} {mpp:>8}  "
        f"{slide['label'] or '-':<12} {slide['route'] or '-':<9} {'; '.join(filter(None, notes))}".rstrip()
    )
