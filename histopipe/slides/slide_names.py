"""Names of slides: their suffixes, the patient in a TCGA barcode, and the match of names in tables with slide ids."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import PurePosixPath

from histopipe.errors import UsageError
from histopipe.slides.slide_formats import SUFFIXES
from histopipe.system.table_files import nfc

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
    with the leading zeros that a spreadsheet had removed, with the id.
    """

    def __init__(self, ids: Iterable[str], fallback_ids: Iterable[str] = ()) -> None:
        self.ids = frozenset(ids)
        self._fallback = SlideNames(fallback_ids) if fallback_ids else None
        # Ids by number and text of their forms: in full, their last part, and without blanks at the ends.
        self._by_form = defaultdict[tuple[int, str], set[str]](set)
        for name in self.ids:
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

    def nearest(self, written: str) -> str:
        """Return the most similar id, as a hint."""
        forms = sorted(form for number, form in self._by_form if number == 0)
        near = difflib.get_close_matches(written, forms, n=1, cutoff=0.3)
        return next(iter([*near, *forms]), "none")


def without_suffix(name: str) -> str:
    """Return a name without the suffix of a slide or image format."""
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix.lower() in SUFFIXES else name
