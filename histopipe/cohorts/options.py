"""Options of `cohort`. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from histopipe.errors import UsageError
from histopipe.system.settings import check_settings, setting
from histopipe.system.table_cells import event_column, refuse_unclear_event

_CHOICE, _VALUES, _FILES = "Choice of slides", "Values", "Files on disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortOptions:
    """Options of `cohort`."""

    slides: Literal["diagnostic", "frozen", "all"] = setting(
        "diagnostic",
        "Kind of slides: diagnostic (DX), frozen (TS, MS, BS) or all. Slides of unknown kind are not frozen.",
        group=_CHOICE,
    )
    where: str | None = setting(
        None,
        "Condition on columns, such as \"sample_type == 'Primary Tumor' and age > 60\".",
        group=_CHOICE,
    )
    label: str | None = setting(
        None, "Column of a table with the label; folder for the slide's folder.", group=_VALUES
    )
    map: tuple[str, ...] = setting(
        (),
        'Labels for values of --label: "Stage I=early,Stage IA=early"; "Stage X=" leaves slides out.',
        group=_VALUES,
        format="repeated",
    )
    event: str | None = setting(
        None,
        "Column with the event: dead or alive, 1 or 0, true or false; or COLUMN=VALUE: it happened where COLUMN has VALUE.",
        group=_VALUES,
    )
    censored: str | None = setting(
        None,
        "In place of --event: column with 0 or false if the event happened, and 1 or true if it did not.",
        group=_VALUES,
    )
    time: tuple[str, ...] = setting(
        (),
        "Column with the time; or columns: that of patients with the event, then those of the others.",
        group=_VALUES,
    )
    columns: tuple[str, ...] = setting(
        (), "Further columns for the labels file, such as covariates: age,gender.", group=_VALUES
    )
    patient: str | None = setting(
        None, "Column with the patient.", group=_VALUES, default_text="by name"
    )
    site: str | None = setting(
        None,
        "Column with the site.",
        group=_VALUES,
        default_text="by name, or the tissue source site of a TCGA barcode",
    )
    take: str | None = setting(
        None,
        "Of several rows per patient, take the first or last by a column: last:days_to_follow_up.",
        group=_VALUES,
    )
    na: tuple[str, ...] | None = setting(
        None,
        "Cells that are missing values.",
        group=_VALUES,
        default_text="as for labels, and those of GDC, such as Not Reported",
    )
    check: bool = setting(
        False, "Compare the MD5 of the files on disk with the tables.", group=_FILES
    )

    def __post_init__(self) -> None:
        check_settings(self)
        refuse_unclear_event(self.event)
        if self.event and self.censored:
            raise UsageError("--censored", found=f"--event {self.event}", expected="one of them")

    @property
    def event_column(self) -> tuple[str | None, str | None]:
        """Column of the event, and the value that means that it happened; None if cells say it."""
        column, value = event_column(self.event) if self.event else (None, None)
        return (self.censored, "0") if self.censored else (column, value)
