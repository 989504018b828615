"""Options of `histopipe train` that choose patches and labels."""

from __future__ import annotations

import click

from histopipe.cli.parameters import Share, together

label_options = together(
    click.option(
        "--labels", type=click.Path(),
        help="CSV: slide,label[,patient][,site], instead of the recorded labels.",
    ),
    click.option(
        "--allow-extra-rows", is_flag=True, help="Ignore rows of --labels that name no slide."
    ),
    click.option(
        "--labels-from", type=click.Choice(["slide", "annotation"]), default="slide",
        help="Learn the class of a patch's slide, or the one that is drawn on it (`histopipe annotate`).",
    ),
    click.option(
        "--min-tissue", type=Share(), default="0", help="Leave out patches with less tissue."
    ),
    click.option(
        "--min-focus", type=float, default=0.0,
        help="Leave out patches less sharp than this (`histopipe quality` measures it).",
    ),
    click.option(
        "--exclude-pen", type=Share(), default="100%",
        help="Leave out patches of which more than this is pen.",
    ),
    click.option(
        "--exclude-dark", type=Share(), default="100%",
        help="Leave out patches of which more than this is folded or black.",
    ),
)  # fmt: skip
"""Decorates a command with these options."""
