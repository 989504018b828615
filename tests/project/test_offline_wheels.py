"""Libraries for a machine without network."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from offline_wheels import digest, install, join, select_pins, split


def _tiny_wheel(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "tiny-1.0-py3-none-any.whl"
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", "VALUE = 7\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_pins_are_those_needed_and_those_of_patterns() -> None:
    lock = "a==1 \\\n    --hash=sha256:1\nb==2\nnvidia-x==3\nnvidia-y==4\n"
    chosen = select_pins(lock, "a==1\n", ["nvidia-*"], ["nvidia-y"])
    assert chosen == "a==1 \\\n    --hash=sha256:1\nnvidia-x==3\n"


@pytest.mark.long(reason="pip installs into a new environment")
def test_parts_that_come_one_by_one_and_damaged_are_joined_and_installed(tmp_path: Path) -> None:
    wheel = _tiny_wheel(tmp_path / "from")
    pins = f"tiny==1.0 --hash=sha256:{digest(wheel)}\n"
    sent, come, wheels = tmp_path / "sent", tmp_path / "come", tmp_path / "wheels"
    count = split(wheel.parent, pins, sent, 200)
    assert count > 2
    come.mkdir()
    (come / "parts.json").write_bytes((sent / "parts.json").read_bytes())
    for number in range(count, 0, -1):  # in the other order
        name = f"part-{number:03d}"
        content = (sent / name).read_bytes()
        (come / name).write_bytes(b"?" + content[1:])
        assert name in join(come, wheels)
        (come / name).write_bytes(content)
        assert len(join(come, wheels)) == number - 1
        (come / name).unlink()
    assert digest(wheels / wheel.name) == digest(wheel)
    install(wheels, tmp_path / "venv")
    command = [str(tmp_path / "venv/bin/python"), "-c", "import tiny; print(tiny.VALUE)"]
    assert subprocess.check_output(command, text=True) == "7\n"
