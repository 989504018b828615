"""`histopipe info`: what a store holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, slide by slide.")
@untrusted_option("store")
def command(store: Path, as_json: bool) -> None:
    """Tell what STORE holds: slides by state, patches, bytes, scales, labels and settings.

    \b
    Example: histopipe info patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.store.store import Store
    from histopipe.store.summary import summarise

    with Store(store) as opened:
        summary = summarise(opened)
    if as_json:
        click.echo(json.dumps(summary, indent=2, ensure_ascii=False))
        return
    for line in _lines(summary):
        click.echo(line)


def _lines(summary: dict[str, Any]) -> list[str]:
    spec = summary["spec"]
    scale = f"{spec['mpp']:g} mpp" if spec["mpp"] else f"level {spec['level']}"
    lines = [
        f"{summary['path']}  (format {summary['version']}, created {summary['created']})",
        f"patches   {summary['patches']:,} of {spec['patch_size']}² at {scale}, overlap {spec['overlap']}, "
        f"{spec['codec']}, {summary['patch_bytes'] / 1e6:,.1f} MB ({summary['file_bytes'] / 1e6:,.1f} MB on disk)",
        f"tissue    {spec['tissue']}, at least {spec['tissue_threshold']:g}",
        "slides    " + _counts(summary["states"]),
        "labels    " + _counts(summary["labels"]),
        "patch labels  " + _counts(summary["patch_labels"]),
        "mpp from  " + _counts(summary["mpp_sources"]),
        "routes    " + _counts(summary["routes"]),
        f"unreadable patches  {summary['unreadable']}",
        "",
        f"{'slide':<40} {'state':<9} {'patches':>9} {'mpp':>8}  {'label':<12} {'route':<9} why, notes",
    ]
    for slide in summary["slides"]:
        mpp = f"{slide['mpp']:.4g}" if slide["mpp"] else "-"
        why = "; ".join(
            filter(
                None,
                [
                    slide["error"] or slide["route_reason"],
                    *slide["notes"],
                    *slide["annotation_notes"],
                ],
            )
        )
        lines.append(
            f"{slide['id']:<40} {slide['state']:<9} {slide['stored']:>9,} {mpp:>8}  "
            f"{slide['label'] or '-':<12} {slide['route'] or '-':<9} {why}".rstrip()
        )
    return lines


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
