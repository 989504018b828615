"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A path beside the wanted one to write to; it takes the wanted name at the end, and is removed after an error.

    Example:
        >>> with appearing(Path("metrics.json")) as part:  # doctest: +SKIP
        ...     part.write_text("{}")
    """
    part = path.with_name(f"part-{path.name}")  # a prefix: some writers insist on the suffix
    try:
        yield part
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def storable(text: str) -> str:
    """A text that is UTF-8: bytes of file names that are not are written as \\xNN."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
