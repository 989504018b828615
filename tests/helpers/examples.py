"""Number of examples of property tests."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings with `count` examples in `make nightly`, and about a tenth of them in `make test`."""
    return settings(max_examples=max(3, count * settings().max_examples // 100))
