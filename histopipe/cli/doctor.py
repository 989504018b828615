"""`histopipe doctor`: check this machine and installation."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
def command(store: Path, as_json: bool) -> int:
    """Check this machine and installation, and the disk of STORE, which need not exist yet.

    Checks Python, libraries, slide formats, TensorFlow and its GPUs (a matrix product on each), NVIDIA's driver, disk,
    filesystem and limits, and shows what to do where something is wrong. Exit code 6: something does not work.

    \b
    Example: histopipe doctor /data/patches.lmdb
    """
    from histopipe.diagnostics.doctor import doctor  # late: `--help` needs none of it

    report = doctor(store)
    text = json.dumps(report.to_json(), indent=2, ensure_ascii=False) if as_json else repr(report)
    click.echo(text)
    return report.exit_code
