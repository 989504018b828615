"""Flags of the commands that copy slides into stores."""

from __future__ import annotations

import click

allow_network = click.option(
    "--allow-network",
    is_flag=True,
    help="Allow the output to be on a network filesystem, at your own risk.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
