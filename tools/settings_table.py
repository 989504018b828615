"""Write the pages of docs/reference that are made from declarations: settings.md, formats.md and commands.md.

make docs    # or: python tools/settings_table.py

settings.md has all declared settings of trainings and options of other commands, formats.md the readers of slides and the
formats of `export`, commands.md the list of commands; MkDocs adds their options to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from histopipe.annotations.rules import AnnotationRules
from histopipe.cli import GROUPS
from histopipe.cohorts.options import CohortOptions
from histopipe.dataset.selection import LoadOptions
from histopipe.exporting.export_formats import EXPORTS, ExportFormat, ExportOptions
from histopipe.inference.options import EmbedOptions, PredictOptions
from histopipe.ingestion.options import SETTING_CLASSES, IngestPartOptions, MaskOptions
from histopipe.maintenance.options import MergeOptions, RepairOptions
from histopipe.reports.options import HeatmapOptions, ReportOptions
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig
from histopipe.search.search_settings import SearchSettings
from histopipe.slides.slide_formats import READERS
from histopipe.studies.study_settings import CompareOptions, FoldSettings
from histopipe.system.settings import Setting, declared_settings
from histopipe.viewer.options import ViewOptions

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_HEAD = """# Settings

Written by `make docs` from the declarations in `runs/`, `studies/`, `search/` and `options.py` of other packages.
Do not edit.

The settings of `histopipe train`, of `histopipe train --folds` and of `histopipe tune`. Flags have
their names with `-` for `_`. Python functions (`histopipe.train`, `cross_validate`, `tune`) and
TOML files (`--config`, `config.toml`) use the names unchanged. Column "use": "patches" or "bags"
(`--mil`) for settings of only one kind of training; "resume" if the setting may change with
`--resume`; "search" if `histopipe tune` may search over it.

The options of other commands that read slides or apply a network follow at the end.
"""
_COMMANDS: Mapping[str, tuple[type, ...]] = {
    "Cross-validation": (FoldSettings,),
    "Search": (SearchSettings,),
    "Options of cohort": (CohortOptions,),
    "Options of ingest, plan and import-coords": (*SETTING_CLASSES, IngestPartOptions),
    "Options of tissue": (MaskOptions,),
    "Options of annotate": (AnnotationRules,),
    "Options of repair": (RepairOptions, AnnotationRules),
    "Options of merge": (MergeOptions,),
    "Options of export": (ExportOptions,),
    "Options of predict": (PredictOptions,),
    "Options of embed; for slides, also those of ingest": (EmbedOptions,),
    "Options of heatmap": (HeatmapOptions,),
    "Options of report": (ReportOptions,),
    "Options of compare": (CompareOptions,),
    "Options of view": (ViewOptions,),
    "Further options of load_dataset (Python)": (LoadOptions,),
}


def settings_page() -> str:
    """Return the page."""
    patches, bags = declared_settings(PatchTrainConfig), declared_settings(BagTrainConfig)
    training = declared_settings(PatchTrainConfig, BagTrainConfig)
    groups: dict[str, list[str]] = {}
    for name, declared in training.items():
        default = _default(declared)
        if name in patches and name in bags and _default(bags[name]) != default:
            default = f"{default}; bags: {_default(bags[name])}"
        uses = {
            "patches": name not in bags,
            "bags": name not in patches,
            "resume": declared.resume,
            "search": declared.search,
        }
        use = ", ".join(text for text, applies in uses.items() if applies)
        cells = [f"`{name}`", _values(declared), default, use, declared.help]
        groups.setdefault(declared.group, []).append(_row(cells))
    head = ["setting", "values", "default", "use", "description"]
    parts = [_HEAD] + [_section(group, head, rows) for group, rows in groups.items()]
    for title, classes in _COMMANDS.items():
        rows = [
            _row([f"`{name}`", _values(setting), _default(setting), setting.help])
            for name, setting in declared_settings(*classes).items()
        ]
        parts.append(_section(title, ["setting", "values", "default", "description"], rows))
    return "\n".join(parts)


def _section(title: str, head: list[str], rows: list[str]) -> str:
    return "\n".join([f"## {title}", "", _row(head), _row(["---"] * len(head)), *rows, ""])


def _row(cells: list[str]) -> str:
    return f"|{'|'.join(cells)}|"


def _values(declared: Setting) -> str:
    if declared.choices:
        return ", ".join(declared.choices)
    names = {bool: "flag", int: "whole number", float: "number", str: "text"}
    kind = declared.format.removeprefix("repeated") or names.get(declared.item_type, "text")
    kind = f"list of {kind}s" if declared.is_list else kind
    kind = f"{kind}, {declared.range_text}" if declared.range_text else kind
    return kind if declared.word is None else f"{kind}; or {declared.word}"


def _default(declared: Setting) -> str:
    return declared.default_shown or "-"


_FORMATS_HEAD = """# Formats

Written by `make docs` from `READERS` in `slides/slide_formats.py` and `EXPORTS` in
`exporting/export_formats.py`. Do not edit.
"""


def formats_page() -> str:
    """Return the page."""
    readers = [
        _row([f"`{name}`", reader.formats, _codes(reader.suffixes) or "TIFF", _extra(reader.extra)])
        for name, reader in READERS.items()
    ]
    exports = [
        _row([_export_flag(name, each), f"{each.source}", each.content, _extra(each.extra)])
        for name, each in EXPORTS.items()
    ]
    return "\n".join(
        [
            _FORMATS_HEAD,
            _section("Slides", ["`--reader`", "formats", "files", "extra"], readers),
            _section("Exports", ["flag of `export`", "of", "content", "extra"], exports),
        ]
    )


def _export_flag(name: str, export: ExportFormat) -> str:
    return f"`{'--index' if export.index else '--to'} {name}`"


def _codes(texts: Sequence[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _extra(extra: str | None) -> str:
    return f"`[{extra}]`" if extra else "-"


_COMMANDS_HEAD = """# Commands

Written by `make docs` from `GROUPS` in `cli/__init__.py`. Do not edit.

`histopipe COMMAND --help` shows the options and an example. The [cheat sheet](../cheat-sheet.md)
finds the command for a task.
"""
_COMMANDS_TAIL = """## Output and shell completion

Every command prints its results to standard output, and progress and messages to standard error.
`--json` prints results for programs. [Exit codes](exit-codes.md) are the same for all commands.

Shell completion: add one line to the start file of your shell.

| shell | file | line |
| --- | --- | --- |
| bash | `~/.bashrc` | `eval "$(_HISTOPIPE_COMPLETE=bash_source histopipe)"` |
| zsh | `~/.zshrc` | `eval "$(_HISTOPIPE_COMPLETE=zsh_source histopipe)"` |
| fish | `~/.config/fish/completions/histopipe.fish` | `_HISTOPIPE_COMPLETE=fish_source histopipe \\| source` |

::: mkdocs-click
    :module: histopipe.cli
    :command: histopipe
    :prog_name: histopipe
    :depth: 1
    :style: plain
"""


def commands_page() -> str:
    """Return the page."""
    groups = [
        _section(
            title,
            ["command", "use"],
            [_row([f"[`{name}`](#{name})", use]) for name, (_, use) in commands.items()],
        )
        for title, commands in GROUPS.items()
    ]
    return "\n".join([_COMMANDS_HEAD, *groups, _COMMANDS_TAIL])


PAGES = {"settings.md": settings_page, "formats.md": formats_page, "commands.md": commands_page}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (FOLDER / page).write_text(text(), encoding="utf-8")
