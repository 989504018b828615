"""Make a download of the GDC: synthetic slides in folders of UUIDs, and the tables of the portal, with usual problems.

    python tools/make_gdc.py FOLDER [--slides 40]

Half of the slides have tumour, and their patients a higher stage. Among the files are frozen sections, two slides of one
patient, a slide that was not downloaded, one that is incomplete, a copy, and a report that is no slide.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from archives import MISSING, Gdc, new_uuid, write_tar

from histopipe.demo.demo import make_demo_slides

SITES = ("A1", "A2", "B6", "D8", "E2")


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slides", type=int, default=40)
    options = parser.parse_args()
    folder, rng, gdc = options.folder, np.random.default_rng(1), Gdc()
    labels = make_demo_slides(folder / "made", options.slides + 2, 0, labelled=True)
    spare = (folder / "made" / "slides" / f"{labels[-1][0]}.svs").read_bytes()
    for number, (name, label) in enumerate(labels[:-2]):
        patient = f"TCGA-{SITES[number % len(SITES)]}-{number:04}"
        path = folder / "made" / "slides" / f"{name}.svs"
        gdc.add(f"{patient}-01Z-00-DX1", content=path.read_bytes())
        late, dead = label == "tumour", rng.random() < (0.7 if label == "tumour" else 0.3)
        stages = ["Stage III", "Stage IIIA", "Stage IV"] if late else ["Stage I", "Stage IIA"]
        row = {
            "patient": patient,
            "age_at_index": int(rng.normal(62 + 4 * late, 9)),
            "gender": rng.choice(["female", "male"]),
            "vital_status": "Dead" if dead else "Alive",
            "days_to_death": 1 + int(rng.exponential(900)) if dead else MISSING,
            "days_to_last_follow_up": MISSING if dead else 1 + int(rng.exponential(1500)),
            "ajcc_pathologic_stage": rng.choice(stages),
            "classification_of_tumor": "primary",
            "diagnosis_is_primary_disease": "true",
        }
        treatments = ("Pharmaceutical Therapy, NOS", "Radiation Therapy, NOS")
        gdc.clinical += [{**row, "treatment_type": treatment} for treatment in treatments]
    # Of a metastasis, in the first row.
    other = {"diagnosis_is_primary_disease": "false", "ajcc_pathologic_stage": "Stage IVB"}
    gdc.clinical.insert(0, {**gdc.clinical[0], **other})
    first, second, third, last = (gdc.files[n] for n in (0, 1, 2, -1))
    gdc.add(f"{first.patient}-01A-01-TS1", content=second.content[:9000])
    gdc.add(f"{first.patient}-11A-01-TS1", content=third.content[:9000])
    gdc.add(f"{second.patient}-01Z-00-DX2", content=spare)
    gdc.add(f"{third.patient}-01Z-00-DX1", id=new_uuid("copy"), content=third.content)
    gdc.add(f"{third.patient}-01Z-00-DX8", suffix=".pdf", content=b"a report")
    (folder / "gdc_manifest.txt").write_text(gdc.manifest())
    (folder / "gdc_sample_sheet.tsv").write_text(gdc.sample_sheet())
    (folder / "metadata.cart.json").write_text(gdc.cart())
    write_tar(folder / "clinical.cart.tar.gz", clinical=gdc.clinical_table())
    gdc.write_slides(folder / "slides")
    (folder / "slides" / last.id / last.name).unlink()
    cut = folder / "slides" / gdc.files[5].id / gdc.files[5].name
    cut.write_bytes(cut.read_bytes()[:-5000])
    shutil.rmtree(folder / "made")


if __name__ == "__main__":
    main()
