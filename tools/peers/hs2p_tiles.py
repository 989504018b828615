"""Tile slides with hs2p's command and its OpenSlide reader, tiles saved. Called by tools/bench_peers.py."""

import csv
import ctypes.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path


def main() -> None:
    """Tile all slides of a job; the tool chooses the patches, and draws no preview."""
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    table = out / "slides.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sample_id", "image_path"])
        rows.writerows([Path(entry["path"]).stem, entry["path"]] for entry in job["slides"])
    params = {
        "requested_spacing_um": job["mpp"],
        "requested_tile_size_px": job["patch_size"],
        "tolerance": 0.05,
    }
    config = {
        "csv": str(table),
        "output_dir": str(out),
        "save_tiles": True,
        "tiling": {
            "backend": "openslide",
            "mask_backend": "openslide",
            "params": params,
            "preview": {"save_mask_preview": False, "save_tiling_preview": False},
        },
        "speed": {
            "num_workers": job["workers"],
            "jpeg_backend": "turbojpeg" if ctypes.util.find_library("turbojpeg") else "pil",
        },
    }
    file = out / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = Path(sys.executable).with_name("hs2p")
    subprocess.run([command, file], check=True)
    count = 0
    for path in out.rglob("*.tiles.tar"):
        with tarfile.open(path) as archive:
            count += sum(member.isfile() for member in archive)
    print(count)


main()
