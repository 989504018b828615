"""Tile slides with atlas-patch's command, images saved. Called by tools/bench_peers.py."""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Tile all slides of a job; the tool chooses the patches."""
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    slides = out / "slides"
    slides.mkdir(parents=True)
    for entry in job["slides"]:
        path = Path(entry["path"])
        (slides / path.name).symlink_to(path)
    command = [
        Path(sys.executable).with_name("atlaspatch"),
        "segment-and-get-coords",
        slides,
        "--output",
        out / "patches",
        "--patch-size",
        str(job["patch_size"]),
        "--target-mag",
        str(round(10 / job["mpp"])),
        "--device",
        "cpu",
        "--patch-workers",
        str(job["workers"]),
        "--save-images",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    count = len(list(out.rglob("*.png")))
    if job["slides"] and not count:
        text = (done.stdout + done.stderr).strip().splitlines()
        errors = [line.strip() for line in text if "error" in line.lower()]
        raise SystemExit((errors or text or ["no image was written"])[-1])
    print(count)


main()
