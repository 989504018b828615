"""Check that every library of the container images has a wheel: `docker/install` installs nothing else.

    python tools/check_image_locks.py [LOCK…]        default: requirements/cpu.lock and gpu.lock

`make nightly` installs `nightly.lock` with wheels only, which shows it for the versions in both locks, with their hashes. For the others,
which are CUDA and TensorFlow without CUDA, pip lists the versions that have a wheel for the Python of the images. A dry run
of pip with hashes would download all wheels, which are 3 GB.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
_LEAST_PIP = 25


def read_versions(lock: Path) -> dict[str, str]:
    """Return the locked version of each library."""
    text = lock.read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def versions_with_wheels(name: str) -> list[str]:
    """Return the versions of a library that have a wheel for this machine and the Python of the images."""
    if int(version("pip").split(".")[0]) < _LEAST_PIP:
        raise SystemExit(
            f"pip {version('pip')} ignores --only-binary: use pip {_LEAST_PIP} or later"
        )
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    python = re.findall(r"^ARG PYTHON=(\d+\.\d+)", dockerfile, re.MULTILINE)[0]
    command = [
        "pip",
        "index",
        "versions",
        name,
        "--only-binary",
        ":all:",
        "--python-version",
        python,
    ]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    listed = re.findall(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if not listed and "No matching distribution" not in done.stderr:
        raise SystemExit(f"pip cannot list the versions of {name}:\n{done.stderr}")
    return listed[0].split(", ") if listed else []


def without_wheels(lock: Path) -> list[str]:
    """Return the libraries of a lock that have no wheel of their version."""
    tested = read_versions(REQUIREMENTS / "nightly.lock").items()
    untested = [pin for pin in read_versions(lock).items() if pin not in tested]
    with ThreadPoolExecutor(4) as pool:
        listed = pool.map(versions_with_wheels, [name for name, _ in untested])
        return [
            f"{name}=={version}"
            for (name, version), versions in zip(untested, listed, strict=True)
            if version not in versions
        ]


def main(locks: Iterable[Path]) -> int:
    """Print the libraries without wheels; return 1 if there are any."""
    status = 0
    for lock in locks:
        if not read_versions(lock):
            raise SystemExit(f"{lock} names no library")
        missing = without_wheels(lock)
        print(f"{lock}: " + (f"no wheel of {', '.join(missing)}" if missing else "wheels only"))
        status |= bool(missing)
    return status


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    sys.exit(main(paths or [REQUIREMENTS / "cpu.lock", REQUIREMENTS / "gpu.lock"]))
