"""`histopipe doctor`: what of this machine and installation helps or hinders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

_SIGNS = {"good": "ok  ", "warning": "note", "bad": "BAD "}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--json", "as_json", is_flag=True, help="All that was found as JSON.")
def command(store: Path, as_json: bool) -> int:
    """Look at this machine and installation, and at the disk of STORE, which need not exist yet.

    Python, libraries, the formats of slides that can be opened, TensorFlow and its GPUs (a matrix product on each), NVIDIA's
    driver, disk, filesystem and limits. Each thing that will not work is told with what to do. Exit code 6: one is bad.

    \b
    Example: histopipe doctor /data/patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.doctor.check import exit_code
    from histopipe.doctor.doctor import examine

    checks = []
    for check in examine(store):
        checks.append(check)
        if not as_json:
            sign = _SIGNS[check.state]
            click.echo(f"{sign}  {check.name:14} {check.found}")
            if check.todo:
                click.echo(f"{'':20} -> {check.todo}")
            sys.stdout.flush()
    code = exit_code(checks)
    if as_json:
        told = {"checks": [check.to_json() for check in checks], "exit_code": int(code)}
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
    return code
