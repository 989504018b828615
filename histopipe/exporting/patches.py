"""Export the patches of a store in the formats of other tools. The image files are copied, not decoded."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from histopipe.errors import (
    DamagedStore,
    ExitCode,
    Interrupted,
    NothingToDo,
    RemoteMissing,
    UsageError,
)
from histopipe.splits.splits import patches_crc
from histopipe.store.format import Columns, patch_key, value_crc
from histopipe.store.reading import JPEG_START
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import (
    atomic_write,
    path_within,
    read_json,
    reading,
    remove_parts,
    roomy,
    write_atomically,
)
from histopipe.system.object_storage import download, list_files, remote_file, write_file
from histopipe.system.output import Progress, Result, counted, exit_code_of, slide_failure
from histopipe.system.shared_folders import PARTS, Share, recorded_by_parts
from histopipe.system.tensorflow import load_quietly
from histopipe.system.urls import public_url

SETTINGS = "export.json"
"""File with the settings of an export, in its folder."""


def _fetch_settings(url: str, folder: Path) -> set[str]:
    """Fetch the settings of an earlier export at a URL. Return the URLs of its files; none for a new export.

    Raises:
        UsageError: there are files of another kind.
    """
    existing, settings = set[str](), f"{url}/{SETTINGS}"
    with suppress(RemoteMissing):
        existing = {file.url for file in list_files(f"{url}/")}
    if settings in existing:
        download(remote_file(settings), folder / SETTINGS)
    elif existing:
        raise UsageError(f"{public_url(url)} is not empty", todo="choose another --out")
    return existing


def record_settings(
    folder: Path,
    store: Store,
    slides: dict[int, SlideRecord],
    *,
    to: str,
    shard_patches: int | None,
    share: Share,
) -> None:
    """Record the settings of the export. UsageError if the folder holds another export, or slides have changed."""
    mine, path = share.folder(folder) / SETTINGS, folder / SETTINGS
    records = [record for record in (path, *recorded_by_parts(path)) if record.exists()]
    crcs = {
        record.id: zlib.crc32(str(record.label).encode(), patches_crc(store, number))
        for number, record in slides.items()
    }
    now = {
        "to": to,
        "store": store.uuid,
        "slides": crcs,
        **({"shard_patches": shard_patches} if shard_patches else {}),
    }
    for record in records:
        with reading(record):
            old = read_json(record)
            differing = [name for name in now if name != "slides" and old.get(name) != now[name]]
            before: dict[str, int] = old["slides"]
        # In tar files, a new slide would shift all patches that follow.
        same = before == crcs if shard_patches else before.items() <= crcs.items()
        if differing or not same:
            what = ", ".join(differing) or "slides were ingested, labelled or removed since"
            raise UsageError(
                f"{folder} holds another export",
                found=f"another {what}" if differing else what,
                todo="choose another --out",
            )
    if not records and {*folder.iterdir()} - {folder / PARTS}:
        raise UsageError(f"{folder} exists and is not empty", todo="choose another --out")
    write_atomically(mine, json.dumps(now, indent=1) + "\n")


@dataclass(frozen=True, slots=True, repr=False)
class ExportResult(Result):
    """Result of exporting patches.

    Attributes:
        folder: folder of the files, or its URL.
        files: number of files written in this run.
        kept: number of files written before.
        patches: number of patches written in this run.
        damaged: patches that were skipped, with the reason.
        failed: reasons of the files that could not be written, by name.
    """

    folder: Path | str
    files: int
    kept: int
    patches: int
    damaged: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """0 if all patches are written, 3 if some are missing, 4 if no file could be written."""
        return exit_code_of(len(self.failed) + len(self.damaged), self.files + self.kept)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{counted(self.patches, 'patch')} in {counted(self.files, 'file')}, "
                f"{self.kept} already done: {self.folder}",
                *(f"skipped: {patch}" for patch in self.damaged),
                *(f"failed: {name}: {reason}" for name, reason in self.failed.items()),
            ]
        )


Patch = tuple[dict[str, Any], bytes]
"""A patch to export: its slide, position and measurements as JSON values, and its JPEG or PNG file."""


def _describe(record: SlideRecord, index: Columns, row: int) -> dict[str, Any]:
    """Return slide, position and measurements of a patch as JSON values. `size_l0` is 0 if unknown."""
    fields = {
        "slide": record.id,
        "patient": record.patient,
        "site": record.site,
        "label": record.label,
        "patch": row,
        "x_l0": int(index["x_l0"][row]),
        "y_l0": int(index["y_l0"][row]),
        "size_l0": round(record.side_l0),
        "mpp": record.patch_mpp,
        "tissue": float(index["tissue"][row]),
        "focus": float(index["focus"][row]),
    }
    # JSON has no NaN.
    return {name: None if value != value else value for name, value in fields.items()}  # noqa: PLR0124


def _suffix(value: bytes) -> str:
    return "jpg" if value[:2] == JPEG_START else "png"


def write_tfrecord(path: Path, patches: Iterable[Patch]) -> None:
    """Write TFRecords with `slide`, `image_raw`, `loc_x` and `loc_y` (centre in level-0 pixels), for slideflow."""
    tf = load_quietly("tensorflow")

    with tf.io.TFRecordWriter(str(path)) as writer:
        for description, value in patches:
            texts = {"slide": description["slide"].encode(), "image_raw": value}
            half = description["size_l0"] // 2
            numbers = {"loc_x": description["x_l0"] + half, "loc_y": description["y_l0"] + half}
            features = tf.train.Features(
                feature={
                    **{
                        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text]))
                        for name, text in texts.items()
                    },
                    **{
                        name: tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
                        for name, number in numbers.items()
                    },
                }
            )
            writer.write(tf.train.Example(features=features).SerializeToString())


def write_tar(path: Path, patches: Iterable[Patch]) -> None:
    """Write a tar file with `SLIDE/ROW.jpg` and `SLIDE/ROW.json` for each patch: one webdataset sample per patch."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for description, value in patches:
            text = json.dumps(description, ensure_ascii=False).encode()
            for suffix, content in ((_suffix(value), value), ("json", text)):
                entry = tarfile.TarInfo(
                    f"{description['slide']}/{description['patch']:06d}.{suffix}"
                )
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def write_folder(path: Path, patches: Iterable[Patch]) -> None:
    """Write a folder with `X_Y.jpg` for each patch. X and Y are its corner; a repeated corner gets `X_Y_ROW.jpg`."""
    path.mkdir()
    for description, value in patches:
        file = path / f"{description['x_l0']}_{description['y_l0']}.{_suffix(value)}"
        if file.exists():  # imported coordinates may repeat
            file = file.with_stem(f"{file.stem}_{description['patch']}")
        file.write_bytes(value)


WRITERS: Mapping[str, Callable[[Path, Iterable[Patch]], None]] = {
    "tfrecord": write_tfrecord,
    "webdataset": write_tar,
    "folder": write_folder,
}


SlideRows = Sequence[tuple[int, range]]
"""Number, and rows of the patches, of each slide in a file or folder to write."""


def export_patches(
    store: Path,
    *,
    out: Path | str,
    to: str,
    share: Share,
    progress: Progress,
    shard_patches: int | None = None,
) -> ExportResult:
    """Export every patch of the complete slides of a store; see `export`. Existing files are kept.

    `shard_patches` is the number of patches per file; None for a file per slide.
    """
    url = None if isinstance(out, Path) else out.rstrip("/")
    with ExitStack() as stack:
        opened = stack.enter_context(Store(store))
        existing = set[str]()
        if url is None:
            folder = Path(out)
            stack.enter_context(share.held(folder))
        else:
            # Each file is written here, sent and removed, so that the disk holds one file at a time.
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="histopipe-export-")))
            existing = _fetch_settings(url, folder)
        slides = {n: r for n, r in opened.complete.items() if r.stored}
        if not slides:
            raise NothingToDo("no patch to export", todo="see `histopipe info`")
        files = _chosen_files(folder, _files(slides, to, shard_patches), share)
        record_settings(folder, opened, slides, to=to, shard_patches=shard_patches, share=share)
        if url is not None:
            write_file(f"{url}/{SETTINGS}", folder / SETTINGS)
        done = {
            path
            for path, _ in files
            if os.path.exists(path)  # noqa: PTH110 - a name may be too long
            or f"{url}/{path.relative_to(folder).as_posix()}" in existing
        }
        try:
            return _write_files(
                opened,
                folder,
                url,
                files=files,
                done=done,
                write=WRITERS[to],
                share=share,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted",
                found=f"{len(done)} of {len(files)} files complete",
                todo="run the same command again to write the others",
            ) from None


def _chosen_files(
    folder: Path, files: Iterable[tuple[str, SlideRows]], share: Share
) -> list[tuple[Path, SlideRows]]:
    """Return the paths and rows of the files of this process. UsageError if two files have the same path."""
    named = [*files]
    paths = {path_within(folder, name): (name, rows) for name, rows in named}
    if len(paths) < len(named):
        raise UsageError(
            "two slides would use the same file", todo="use --to webdataset, or rename a slide"
        )
    chosen = share.chosen({name: sum(len(n) for _, n in rows) for name, rows in named})
    return [(path, rows) for path, (name, rows) in paths.items() if name in chosen]


def _joined_failures(folder: Path, names: Iterable[str], share: Share) -> dict[str, str]:
    """Return why files are missing after all parts; UsageError if no part has tried to write one."""
    failed = share.joined(folder)
    for name in names:
        if name not in failed:
            raise share.missing(folder, name)
    return {name: failed[name] for name in names}


def _write_files(
    store: Store,
    folder: Path,
    url: str | None,
    *,
    files: Sequence[tuple[Path, SlideRows]],
    done: set[Path],
    write: Callable[[Path, Iterable[Patch]], None],
    share: Share,
    progress: Progress,
) -> ExportResult:
    """Write the files that are not done, send each to the URL, if there is one, and add it to `done`."""
    missing, kept = [(path, rows) for path, rows in files if path not in done], len(done)
    names = [path.relative_to(folder).as_posix() for path, _ in missing]
    failed = _joined_failures(folder, names, share) if share.join else dict[str, str]()
    damaged = [*share.joined(folder, "damaged")]
    patches: Counter[str] = Counter()

    def read_patches(name: str, slides: SlideRows) -> Iterator[Patch]:
        """Yield the patches of a file, and count them. Damaged patches are reported and skipped."""
        for number, rows in slides:
            record, index = store.records[number], store.index(number)
            for row in (row for row in rows if index["length"][row]):
                try:
                    value = store.value(number, row)
                    if value_crc(patch_key(number, row), value) != index["crc"][row]:
                        raise DamagedStore("does not match its checksum")  # noqa: TRY301 - handled below
                except DamagedStore as error:
                    damaged.append(f"{record.id}: patch {row}: {error}")
                    progress.message(f"skipped: {damaged[-1]}")
                else:
                    patches[name] += 1
                    yield _describe(record, index, row), value

    bar = progress.bar("exporting", unit="files", total=len(files), done=kept, detail=True)
    with bar, roomy(folder, "run the same command again"):
        # Not a part: other parts, on other machines, may be writing.
        for parent in set() if share.is_part else {path.parent for path, _ in missing}:
            remove_parts(parent)
        for name, (path, rows) in () if share.join else zip(names, missing, strict=True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as part:
                    write(part, read_patches(name, rows))
                if url is not None:
                    write_file(f"{url}/{name}", path)
                    path.unlink()
                done.add(path)
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                failed[name] = slide_failure(error)
                del patches[name]
                bar.item(f"failed {name}: {failed[name]}", problem=True)
            bar.advance()
        share.end(folder, failed, damaged=dict.fromkeys(damaged, ""))
    return ExportResult(
        folder if url is None else public_url(url),
        len(missing) - len(failed),
        kept,
        patches.total(),
        tuple(damaged),
        failed,
    )


def _files(
    slides: Mapping[int, SlideRecord], to: str, shard_patches: int | None
) -> Iterator[tuple[str, SlideRows]]:
    """Yield the name and the rows of each file: of one slide, or the next `shard_patches` patches of all slides."""
    if shard_patches:
        *begins, total = accumulate((record.planned for record in slides.values()), initial=0)
        for shard, first in enumerate(range(0, total, shard_patches)):
            rows = [
                (
                    number,
                    range(record.planned)[
                        max(first - begin, 0) : max(first + shard_patches - begin, 0)
                    ],
                )
                for begin, (number, record) in zip(begins, slides.items(), strict=True)
            ]
            yield f"patches-{shard:06d}.tar", [(number, part) for number, part in rows if part]
        return
    for number, record in slides.items():
        names = {
            "tfrecord": f"{record.id}.tfrecords",
            "folder": f"{_flat(record.label or 'unlabelled')}/{_flat(record.id)}",
        }
        yield names[to], [(number, range(record.planned))]


def _flat(name: str) -> str:
    """Return a slide id or a label as one folder name, since readers use the first folder level as the class."""
    return name.replace("/", "__") if name.strip(".") else name.replace(".", "%2E")  # no . or ..
