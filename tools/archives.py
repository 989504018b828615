"""Files in the formats of public archives, with made-up values: tables with the columns that the archives publish, and slides.

The slides are small files that only have the names of slides.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MISSING = "'--"
CLINICAL = {
    "2019": (
        "case_id",
        "submitter_id",
        "project_id",
        "gender",
        "tumor_stage",
        "vital_status",
        "days_to_death",
        "days_to_last_follow_up",
    ),
    "2024": (
        "case_id",
        "case_submitter_id",
        "project_id",
        "age_at_index",
        "days_to_death",
        "gender",
        "vital_status",
        "ajcc_pathologic_stage",
        "classification_of_tumor",
        "days_to_diagnosis",
        "days_to_last_follow_up",
        "diagnosis_is_primary_disease",
        "residual_disease",
        "residual_disease",
        "treatment_type",
    ),
    "2025": (
        "project.project_id",
        "cases.case_id",
        "cases.submitter_id",
        "demographic.age_at_index",
        "demographic.days_to_death",
        "demographic.gender",
        "demographic.vital_status",
        "diagnoses.ajcc_pathologic_stage",
        "diagnoses.classification_of_tumor",
        "diagnoses.days_to_diagnosis",
        "diagnoses.days_to_last_follow_up",
        "diagnoses.diagnosis_is_primary_disease",
        "diagnoses.submitter_id",
        "treatments.treatment_type",
    ),
}
"""Some of the columns of GDC's clinical.tsv, by the year of the download, in their order."""
SAMPLE_SHEET = {
    "old": (
        "File ID",
        "File Name",
        "Data Category",
        "Data Type",
        "Project ID",
        "Case ID",
        "Sample ID",
        "Sample Type",
    ),
    "new": (
        "File ID",
        "File Name",
        "Data Category",
        "Data Type",
        "Project ID",
        "Case ID",
        "Sample ID",
        "Tissue Type",
        "Tumor Descriptor",
        "Specimen Type",
        "Preservation Method",
    ),
}
SLIDES = (
    "project.project_id",
    "cases.case_id",
    "cases.submitter_id",
    "samples.sample_id",
    "samples.submitter_id",
    "portions.portion_id",
    "portions.submitter_id",
    "slides.percent_tumor_nuclei",
    "slides.section_location",
    "slides.slide_id",
    "slides.submitter_id",
)


def new_uuid(name: str) -> str:
    """Return a UUID that depends on a name only."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))


def tsv(
    columns: Sequence[str], rows: Iterable[Mapping[str, object]], missing: str = MISSING
) -> str:
    """Return a table with tabs. Missing cells are `missing`."""
    lines = ["\t".join(columns)]
    lines += ["\t".join(str(row.get(name, missing)) for name in columns) for row in rows]
    return "\n".join(lines) + "\n"


@dataclass
class GdcFile:
    """A file of the GDC."""

    barcode: str
    project: str = "TCGA-ZZZZ"
    suffix: str = ".svs"
    content: bytes = b""
    id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        self.id = self.id or new_uuid(f"file {self.barcode}{self.suffix}")
        self.name = self.name or f"{self.barcode}.{new_uuid(self.barcode).upper()}{self.suffix}"
        self.content = self.content or self.name.encode() * 20

    @property
    def patient(self) -> str:
        """Barcode of the patient."""
        is_tcga = self.barcode.startswith("TCGA-")
        return self.barcode[:12] if is_tcga else "-".join(self.barcode.split("-")[:3])

    @property
    def md5(self) -> str:
        """MD5 of the content."""
        return hashlib.md5(self.content).hexdigest()  # noqa: S324


@dataclass
class Gdc:
    """A download of the GDC. `clinical` are rows with the column names after the last dot."""

    files: list[GdcFile] = field(default_factory=list)
    clinical: list[dict[str, object]] = field(default_factory=list)

    def add(self, barcode: str, **options: str | bytes) -> GdcFile:
        """Add a file."""
        file = GdcFile(barcode, **options)  # type: ignore[arg-type]
        self.files.append(file)
        return file

    def manifest(self) -> str:
        """Return the manifest."""
        rows = [
            {
                "id": f.id,
                "filename": f.name,
                "md5": f.md5,
                "size": len(f.content),
                "state": "released",
            }
            for f in self.files
        ]
        return tsv(("id", "filename", "md5", "size", "state"), rows)

    def sample_sheet(self, version: str = "new") -> str:
        """Return the sample sheet, of a version in `SAMPLE_SHEET`."""
        rows = [
            {
                "File ID": f.id,
                "File Name": f.name,
                "Data Category": "Biospecimen",
                "Data Type": "Slide Image",
                "Project ID": f.project,
                "Case ID": f.patient,
                "Sample ID": f.barcode[:16],
                "Sample Type": "Solid Tissue Normal" if f.barcode[13] == "1" else "Primary Tumor",
                "Tissue Type": "Normal" if f.barcode[13] == "1" else "Tumor",
                "Tumor Descriptor": "Primary",
                "Specimen Type": "Unknown",
                "Preservation Method": "FFPE" if f.barcode[15] == "Z" else "OCT",
            }
            for f in self.files
        ]
        return tsv(SAMPLE_SHEET[version], rows)

    def cart(self) -> str:
        """Return the metadata of the cart."""
        return json.dumps(
            [
                {
                    "data_format": "SVS",
                    "associated_entities": [
                        {
                            "entity_submitter_id": f.barcode,
                            "entity_type": "slide",
                            "case_id": new_uuid(f.patient),
                            "entity_id": new_uuid(f"slide {f.barcode}"),
                        }
                    ],
                    "file_name": f.name,
                    "file_size": len(f.content),
                    "md5sum": f.md5,
                    "file_id": f.id,
                    "experimental_strategy": "Diagnostic Slide"
                    if "-DX" in f.barcode
                    else "Tissue Slide",
                }
                for f in self.files
            ]
        )

    def clinical_table(self, version: str = "2025") -> str:
        """Return the clinical table, of a version in `CLINICAL`."""
        columns = CLINICAL[version]
        rows = []
        for row in self.clinical:
            ids = {
                "case_id": new_uuid(str(row["patient"])),
                "project_id": row.get("project", "TCGA-ZZZZ"),
            }
            names = {**row, **ids}
            rows.append(
                {
                    column: row["patient"]
                    if column in ("cases.submitter_id", "case_submitter_id", "submitter_id")
                    else names.get(column.rpartition(".")[2], MISSING)
                    for column in columns
                }
            )
        return tsv(columns, rows)

    def slides_table(self) -> str:
        """Return the table of slides of the biospecimens."""
        rows = [
            {
                "project.project_id": f.project,
                "cases.submitter_id": f.patient,
                "slides.submitter_id": f.barcode,
                "slides.percent_tumor_nuclei": "75.0",
                "slides.slide_id": new_uuid(f"slide {f.barcode}"),
            }
            for f in self.files
        ]
        return tsv(SLIDES, rows)

    def write_slides(self, folder: Path, *, flat: bool = False) -> Path:
        """Write the slides as gdc-client does, or all into one folder."""
        for file in self.files:
            target = folder if flat else folder / file.id
            target.mkdir(parents=True, exist_ok=True)
            (target / file.name).write_bytes(file.content)
            if not flat:
                (target / "logs").mkdir(exist_ok=True)
                (target / "logs" / f"{file.name}.parcel").write_bytes(b"x")
        return folder


def write_tar(path: Path, **members: str) -> Path:
    """Write tables as NAME.tsv into an archive."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            entry = tarfile.TarInfo(f"{name}.tsv")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path
