"""Files of slides: which files form a slide, changes of them, its id, the match of names in tables with ids, and its reader."""

from __future__ import annotations

import difflib
import hashlib
import os
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, product
from operator import attrgetter
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import numpy as np

from histopipe.errors import SlideError, SlideUnreadable, UsageError, reported_as
from histopipe.geometry import RegionL0, Size
from histopipe.slides.openslide_reader import OpenSlideReader, detected_format
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.slide_formats import (
    READERS,
    SUFFIXES,
    TIFF_SUFFIXES,
    has_image_name,
    readers_of,
)
from histopipe.system.files import TIFF_SIGNS
from histopipe.system.object_storage import RemoteFile
from histopipe.system.output import to_storable_text
from histopipe.system.table_cells import nfc


@dataclass(frozen=True, slots=True)
class SlideFile:
    """A slide: its id, the path that OpenSlide opens, and all of its files.

    `subfolder` is the first folder below the user's argument, which may be the name of its class. `problem` is a
    problem of the file name that prevents the ingest, if any. A slide in object storage or on a web server has the
    `remote` files, in the order of `files`; its paths are those in the storage, and exist only after staging. `links`
    are other names of the same file that were found. A local copy of another file has the fingerprint of this `original`.
    `core` is the region of one core of a tissue microarray, from the corner of the scanned area.
    """

    id: str
    path: Path
    files: tuple[Path, ...]
    subfolder: str | None = None
    problem: str | None = None
    remote: tuple[RemoteFile, ...] = ()
    links: tuple[Path, ...] = ()
    original: Fingerprint | None = None
    core: RegionL0 | None = None

    @property
    def location(self) -> str:
        """Path or URL of the file that OpenSlide opens, for messages and records. It contains no secret."""
        return self.remote[0].location if self.remote else str(self.path)

    def resolve(self) -> str:
        """Return the path of the slide without symbolic links, or its URL, in the form used in records."""
        return self.location if self.remote else to_storable_text(os.path.realpath(self.path))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Total size and newest modification time of all files of a slide; in object storage also their ETags."""

    size_bytes: int
    mtime_ns: int
    etag: str | None = None


def fingerprint(slide: SlideFile) -> Fingerprint:
    """Return the fingerprint of a slide's files: of files in object storage, when they were listed.

    That of a copy is the one of the original.

    Raises:
        SlideUnreadable: a file is missing.
    """
    if slide.original is not None:
        return slide.original
    if slide.remote:
        return Fingerprint(
            sum(file.size_bytes for file in slide.remote),
            max(file.mtime_ns for file in slide.remote),
            " ".join(file.etag or "" for file in slide.remote).strip() or None,
        )
    with reported_as(SlideUnreadable, f"{slide.path} cannot be read", OSError):
        stats = [path.stat() for path in slide.files]
    return Fingerprint(sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats))


def file_sizes(files: Iterable[SlideFile]) -> dict[str, int]:
    """Return the size in bytes of each slide, and of a core its part of the file; 0 if a file is missing."""
    sizes, entries = {}, [*files]
    count = Counter(file.path for file in entries)
    for file in entries:
        sizes[file.id] = 0
        with suppress(SlideError):
            sizes[file.id] = fingerprint(file).size_bytes // count[file.path]
    return sizes


def tile_hash(path: Path) -> str | None:
    """Return a hash of a TIFF file for which OpenSlide computes no quickhash; None if it has no tiles.

    It covers the lengths of all native tiles and the bytes of 64 tiles spread over the largest image. Whole slides are
    too large to read twice, and the tile lengths of two scans are never all equal.
    """
    from histopipe.slides.tiff_tiles import hash_tiles, try_tiff  # late: most slides need none

    return try_tiff(path, hash_tiles)


_BLOCKS, _BLOCK_BYTES, _FINER = 64, 1 << 14, 64
"""Number and size of the blocks that a pixel hash covers. Other values would give other hashes than those in records."""
_PIXEL_FILES = {".mrxs": {".dat"}, ".vms": {".jpg"}, ".vmu": {".ngr"}, ".vsi": {".ets"}}
"""Suffixes of the files with the pixels of a slide that has several files. The others have names and other metadata."""
_Places = tuple[Size, Sequence[Path], Sequence[int], Sequence[int]]
"""Size of level 0, 0 if the format does not state it in one place; and file, offset and length of each tile."""


@dataclass(frozen=True, slots=True)
class SlideHashes:
    """Hashes of a slide; None if unknown.

    `content` is OpenSlide's quickhash, or else the hash of tiles. Stores and features of earlier versions may have no
    other. The quickhash covers the smallest level of a TIFF file only, and of a DICOM series only the number, so that
    different slides may have the same one. `tile_hash` and `pixel_hash` cover level 0.
    """

    content: str | None = None
    tile_hash: str | None = None
    pixel_hash: str | None = None

    def values(self) -> dict[str, str]:
        """Return the hashes that are known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def agree(self, other: SlideHashes) -> bool:
        """Return whether all hashes that both slides have are equal."""
        mine, theirs = self.values(), other.values()
        return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())

    def match_file(self, slide: SlideFile, info: SlideInfo) -> bool:
        """Return whether a slide file has all of these hashes; also if none of them is known."""
        tiles = tile_hash(slide.path) if self.tile_hash or not info.quickhash else None
        content = tiles if self.tile_hash else info.quickhash or tiles
        now = SlideHashes(content, tiles, pixel_hash(slide, info.size) if self.pixel_hash else None)
        return self.values().items() <= now.values().items()


def copy_groups(slides: Sequence[Sequence[SlideHashes]]) -> tuple[list[int], list[int]]:
    """Return a group number for each slide: first by hashes of level 0 only, then by all hashes.

    Two slides are copies if all hashes of level 0 that both have are equal. If they have none in common, they are taken
    for copies if their `content` is equal. Copies of a copy are in one group: with records of earlier versions, it may
    contain slides whose pixels differ. A bag of several slides has the hashes of each of them.
    """
    owners = [owner for owner, scans in enumerate(slides) for _ in scans]
    scans = [scan.values() for slide in slides for scan in slide]
    columns: dict[bool, list[list[Hashable]]] = {True: [list(owners)], False: []}
    # Comparing each pair of slides would take too long, but all slides with the same kinds of hash are compared alike.
    for pair in combinations_with_replacement(dict.fromkeys(map(frozenset, scans)), 2):
        common = frozenset.intersection(*pair)
        compared = sorted(common - {"content"} or common)
        if compared:
            values = [
                {
                    place: tuple(scan[kind] for kind in compared)
                    for place, scan in enumerate(scans)
                    if scan.keys() == hash_names
                }
                for hash_names in pair
            ]
            shared = set(values[0].values()) & set(values[1].values())
            texts = values[0] | values[1]
            columns[compared != ["content"]].append(
                [texts[n] if texts.get(n) in shared else None for n in range(len(scans))]
            )
    by_level0, by_all = connected(*columns[True]), connected(*columns[True], *columns[False])
    first = np.unique(owners, return_index=True)[1].tolist()
    return [by_level0[n] for n in first], [by_all[n] for n in first]


def copy_names(slides: Sequence[Sequence[SlideHashes]]) -> list[str | None]:
    """Return a text for each slide that only its copies share; None if no hash is known.

    It is the `content` unless other slides have this, too. So the order of splits is that of earlier versions.
    """
    groups = copy_groups(slides)[1]
    members: dict[int, list[SlideHashes]] = defaultdict(list)
    for group, scans in zip(groups, slides, strict=True):
        members[group] += scans
    contents = {
        group: min((scan.content for scan in scans if scan.content), default=None)
        for group, scans in members.items()
    }
    uses, names = Counter(contents.values()), {}
    for group, content in contents.items():
        texts = ((scan.pixel_hash or "") + (scan.tile_hash or "") for scan in members[group])
        names[group] = (
            content if content and uses[content] == 1 else min(filter(None, texts), default=content)
        )
    return [names[group] for group in groups]


def connected(*names: Sequence[Hashable]) -> list[int]:
    """Return a group number for each item: items that share a name, other than None, in any list are in one group."""
    parent = list(range(len(names[0])))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for column in names:
        first: dict[Hashable, int] = {}
        for i, name in enumerate(column):
            if name is not None:
                parent[root(i)] = root(first.setdefault(name, i))
    return [root(i) for i in range(len(parent))]


def pixel_hash(slide: SlideFile, size: Size) -> str | None:
    """Return a hash of the stored pixels of a slide whose level 0 has a `size`; None if they cannot be read.

    It covers the size, the lengths of all tiles or strips of level 0, and 64 blocks of 16 kB that are spread over them:
    4,096 blocks of 256 bytes if all lengths are equal.
    Where they are not easily located, it covers the lengths and blocks of the files that contain the pixels. Names,
    paths, times and headers do not matter. PNG, JPEG, BMP and WebP images are decoded, so that an image saved without
    loss in another format has the same hash.
    """
    try:
        if slide.core is not None:
            with open_file(slide) as opened:
                return opened.region_hash()
        if has_image_name(slide.path):
            from histopipe.slides.image_reader import ImageReader  # late: most slides are no images

            pixels = ImageReader(slide.path).read_pixels()
            return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
        return _digest(*_stored_pixels(slide, size))
    except (OSError, ValueError, TypeError, LookupError, OverflowError):
        return None


def _stored_pixels(slide: SlideFile, size: Size) -> _Places:
    """Return where the compressed pixels of level 0 are; of all levels in formats without a simple index of tiles."""
    kind = slide.path.suffix.lower()
    if kind == ".dcm":
        from histopipe.slides.dicom_tiles import find_pixel_data  # late: few slides are DICOM files

        return _whole(find_pixel_data(slide.files, size), size)
    if slide.files == (slide.path,):
        from histopipe.slides.tiff_tiles import find_largest, try_tiff  # late: it takes 0.1 s

        return try_tiff(slide.path, find_largest) or _whole([(slide.path, 0)])
    suffixes = _PIXEL_FILES.get(kind)
    files = [
        (path, 0)
        for path in slide.files
        if (
            path.suffix.lower() in suffixes
            if suffixes
            else path.suffix != ".json" and path.name[0] != "."
        )
    ]
    # The folder of the files may have the slide's name. Within it, names are fixed.
    return _whole(sorted(files, key=lambda file: file[0].relative_to(slide.path.parent).parts[1:]))


def _whole(files: Sequence[tuple[Path, int]], size: Size | None = None) -> _Places:
    """Return the files, each from a start to its end, as one tile each."""
    lengths = [path.stat().st_size - start for path, start in files]
    return size or Size(0, 0), [path for path, _ in files], [start for _, start in files], lengths


def _digest(
    size: Size, files: Sequence[Path], offsets: Sequence[int], tile_lengths: Sequence[int]
) -> str:
    """Return the SHA-256 of the size, the lengths and spread blocks of all tiles, taken as one sequence of bytes."""
    lengths = np.asarray(tile_lengths, "<i8")
    digest = hashlib.sha256(np.r_[size.width, size.height, lengths].astype("<i8").tobytes())
    written = np.flatnonzero(lengths > 0)
    ends = np.cumsum(lengths[written])
    total, opened = int(ends[-1]), None
    # The lengths of tiles without compression do not depend on the pixels, and most blocks may be of the background.
    finer = _FINER if len(written) > 1 and len(set(lengths[written].tolist())) == 1 else 1
    size_bytes = _BLOCK_BYTES // finer
    begins = np.linspace(0, max(0, total - size_bytes), _BLOCKS * finer).astype(int).tolist()
    with ExitStack() as stack:
        for begin in begins:
            end = min(begin + size_bytes, total)
            for n in range(np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end) + 1):
                number, tile_end = written[n], int(ends[n])
                tile_begin = tile_end - int(lengths[number])
                if files[number] is not opened:
                    stack.close()  # a folder may have more files than can be open
                    opened = files[number]
                    file = stack.enter_context(opened.open("rb", buffering=0))
                file.seek(offsets[number] + max(0, begin - tile_begin))
                digest.update(file.read(min(end, tile_end) - max(begin, tile_begin)))
    return digest.hexdigest()


_WITHOUT_ZEROS = 3
"""Number of the form of an id without leading zeros."""


def patient_of(slide_id: str) -> str:
    """Return the patient part of a TCGA barcode in upper case, else the slide id.

    Example:
        >>> patient_of("brca/TCGA-A1-A0SB-01Z-00-DX1"), patient_of("tcga-a1-a0sb-01z")
        ('TCGA-A1-A0SB', 'TCGA-A1-A0SB')
    """
    barcode = re.match(r"(?i)TCGA-\w{2}-\w{4}(?=-|$)", PurePosixPath(slide_id).name)
    return barcode[0].upper() if barcode else slide_id


class SlideNames:
    """Matches names in tables with slide ids: the id, with or without suffix, or its last part if that is unique.

    `fallback_ids` are ids that are used if none of `ids` matches. `restored` are the numbers in a table that matched
    with the leading zeros that a spreadsheet had removed, with the id. `parents` are the ids of the files of cores, whose
    files belong to all of their cores.
    """

    def __init__(
        self,
        ids: Iterable[str],
        fallback_ids: Iterable[str] = (),
        parents: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.ids, self._parents = frozenset(ids), parents
        self._fallback = SlideNames(fallback_ids) if fallback_ids else None
        # Ids by number and text of their forms: in full, their last part, and without blanks at the ends.
        self._by_form = defaultdict[tuple[int, str], set[str]](set)
        for name in self.ids.union(parents.values()):
            for form in {nfc(name), nfc(without_suffix(name))}:
                for key in enumerate((form, PurePosixPath(form).name, form.strip())):
                    self._by_form[key].add(name)
            number = PurePosixPath(name).name
            if number.isdecimal() and number[0] == "0":
                self._by_form[_WITHOUT_ZEROS, number.lstrip("0")].add(name)
        self.restored: dict[str, str] = self._fallback.restored if self._fallback else {}

    def find(
        self, written: str, *, where: str, but_zeros_of: Collection[str] | None = None
    ) -> str | None:
        """Return the id that matches a name, or None. `where` is for messages.

        Leading zeros are restored for cells of tables, but not to get an id in `but_zeros_of`; not at all if it is None.

        Raises:
            UsageError: several slides match.
        """
        written = nfc(written)
        stripped = written.strip()  # file names may have blanks at their ends, which tables lose
        spellings = (written, without_suffix(written), stripped, without_suffix(stripped))
        without_zeros = [] if but_zeros_of is None else [(_WITHOUT_ZEROS, stripped)]
        for key in (*product(range(3), spellings), *without_zeros):
            ids = self._by_form.get(key, set())
            ids = ids.difference(but_zeros_of or ()) if key[0] == _WITHOUT_ZEROS else ids
            if len(ids) > 1:
                raise UsageError(
                    f"{where}: {written!r} matches several slides",
                    found=", ".join(sorted(ids)),
                    expected="the name of one slide",
                    todo="write the full id",
                )
            if ids:
                (name,) = ids
                if key[0] == _WITHOUT_ZEROS:
                    self.restored[written] = name
                return name
        if self._fallback is None:
            return None
        return self._fallback.find(written, where=where, but_zeros_of=but_zeros_of)

    def with_cores(self, files: Mapping[str, Path]) -> dict[str, Path]:
        """Return the files about slides by id, of which cores have those of their slide if they have none themselves."""
        of_cores = {
            core: files[parent]
            for core, parent in self._parents.items()
            if parent in files and core not in files
        }
        kept = {name: file for name, file in files.items() if name in self.ids}
        return kept | of_cores

    def nearest(self, written: str) -> str:
        """Return the most similar id, as a hint."""
        forms = sorted(form for number, form in self._by_form if number == 0)
        near = difflib.get_close_matches(written, forms, n=1, cutoff=0.3)
        return next(iter([*near, *forms]), "none")


def without_suffix(name: str) -> str:
    """Return a name without the suffix of a slide or image format."""
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix.lower() in SUFFIXES else name


_GENERIC = (None, "generic-tiff")
"""Formats by OpenSlide's detection of files that tifffile may read instead: it knows nothing else about them."""


def open_slide(path: Path, reader: str | None = "auto") -> Slide:
    """Open a slide.

    With "auto", the suffix decides, see `READERS`; of generic TIFF files, the content. `reader` may also be the `reader`
    of a slide's record, whose version is ignored; None is "openslide", the only one of earlier versions.

    Raises:
        SlideUnreadable: the file is not a slide, or is damaged.
    """
    chosen = (reader or "openslide").partition(" ")[0]
    errors: dict[str, SlideUnreadable] = {}
    for name in _readers_for(path) if chosen == "auto" else (chosen,):
        try:
            slide: Slide = pkgutil.resolve_name(READERS.get(name, READERS["openslide"]).opener)(
                path
            )
        except SlideUnreadable as error:
            errors[name] = error
        else:
            return slide
    first, *later = errors.values()
    reasons = [f"{name}: {error}" for name, error in errors.items() if str(error) != str(first)]
    if not reasons:
        raise first
    # The advice of the last reader is the best: it knows more about the file than that it is no slide.
    reasons.insert(0, str(SlideUnreadable(first.what, found=first.found)))
    todo = None if any(error.todo for error in later) else first.todo
    raise SlideUnreadable("; ".join(reasons), todo=todo) from first


def open_file(slide: SlideFile, reader: str | None = "auto") -> Slide:
    """Open a slide file as `open_slide`; of a core, the bounds are its region.

    Raises:
        SlideUnreadable: as `open_slide`.
        OptionUnfit: the core is outside of the slide.
    """
    opened = open_slide(slide.path, reader)
    if slide.core is not None:
        opened.info = opened.info.within(slide.core)
    return opened


def _readers_for(path: Path) -> tuple[str, ...]:
    """Return the readers to try, in order."""
    readers = readers_of(path)
    if readers[0] == "openslide" and _is_tiff(path) and detected_format(path) in _GENERIC:
        from histopipe.slides.tiff_tiles import try_tiff  # late: it takes 0.1 s

        return ("tifffile",) if try_tiff(path, attrgetter("is_ome")) else ("openslide", "tifffile")
    return readers


def is_image(slide: SlideFile) -> bool | None:
    """Return whether a slide is one image and not a scan: by its name, or a TIFF file of one image without tiles.

    None if a TIFF file cannot be read. One at a URL counts as a scan, since only its name is known.
    """
    path = slide.path
    if path.suffix.lower() not in TIFF_SUFFIXES or slide.remote:
        return has_image_name(path)
    from histopipe.slides.tiff_tiles import has_one_image, try_tiff  # late: it takes 0.1 s

    return try_tiff(path, has_one_image)


def open_with_openslide(path: Path) -> Slide:
    """Open a slide with OpenSlide, with notes on the pages of a TIFF file that it does not read."""
    notes: tuple[str, ...] = ()
    if _is_tiff(path):
        from histopipe.slides.tiff_reader import check_openslide_pages  # late: as above
        from histopipe.slides.tiff_tiles import try_tiff

        # A file that tifffile cannot read is left to OpenSlide.
        notes = try_tiff(path, partial(check_openslide_pages, path)) or ()
    slide = OpenSlideReader(path)
    slide.info = replace(slide.info, notes=notes if slide.info.vendor in _GENERIC else ())
    return slide


def _is_tiff(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) in TIFF_SIGNS
    return False
