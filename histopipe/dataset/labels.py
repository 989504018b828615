"""Labels of a file in place of the recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from histopipe.dataset.samples import SampleSource
from histopipe.slides.tables import SlideNames, read_labels

Labels = dict[str, tuple[str | None, str | None, str | None]]
"""Label, patient and site by slide id."""


def labels_from(
    path: str | None, stores: Sequence[SampleSource], *, allow_extra: bool
) -> Labels | None:
    """What a labels file says of the slides of stores; None without one.

    Args:
        path: the file.
        stores: whose slides it names.
        allow_extra: ignore rows that name no slide.

    Raises:
        UsageError: the file cannot be read or does not fit the slides.
    """
    if path is None:
        return None
    names = SlideNames(record.id for store in stores for record in store.slides)
    rows = read_labels(Path(path), names, allow_extra=allow_extra)
    return {name: (row.label, row.patient, row.site) for name, row in rows.items()}
