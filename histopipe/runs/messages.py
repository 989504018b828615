"""What a training tells its supervisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = Callable[[str, Any], None]
"""Told by name: the workers ("cluster"), that it begins ("started") and gets on ("beat"), the size of its micro-batches
("micro_batch"), each epoch's figures ("epoch"), and that a fresh process may go on ("restart")."""


def unreported(name: str, value: Any) -> None:
    """For a training without a supervisor."""
