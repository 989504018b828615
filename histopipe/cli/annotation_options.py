"""Options of how outlines become labels, for every command that reads annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from histopipe.cli.parameters import Share, together

if TYPE_CHECKING:
    from histopipe.annotations.rules import AnnotationRules

annotation_options = together(
    click.option(
        "--annotation-threshold", type=Share(), default="50%", show_default=True,
        help="Least share of a patch that its class covers.",
    ),
    click.option("--unclassified", help="Class of outlines that have none.  [default: left out]"),
    click.option(
        "--annotation-origin", type=click.Choice(["auto", "bounds", "slide"]), default="auto",
        show_default=True,
        help="Origin of coordinates: corner of the scanned area, or of level 0; auto chooses by the tool.",
    ),
)  # fmt: skip
"""Decorates a command with these options."""


def rules_of(flags: dict[str, Any], *, roi: str | None = None) -> AnnotationRules:
    """Return the rules that the options make."""
    from histopipe.annotations.rules import AnnotationRules  # late: `--help` needs none of it

    return AnnotationRules(
        threshold=flags["annotation_threshold"], unclassified=flags["unclassified"],
        origin=flags["annotation_origin"], roi=roi,
    )  # fmt: skip
