"""Bring the libraries of a lock to a machine without network, in parts.

    python tools/offline_wheels.py split requirements/gpu.lock PARTS --needed requirements/train.lock --also 'nvidia-*'
    python tools/offline_wheels.py join PARTS WHEELS --venv ENVIRONMENT

`split` downloads wheels by pip, and cuts them into files of at most --part-mb. `join` takes the parts that have come,
in any order, and installs when all are there. PARTS needs `parts.json`, too. Both can be repeated after an interruption.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INDEX, PINS = "parts.json", "pins.txt"
_BLOCK = 1 << 20


def select_pins(lock: str, needed: str | None, also: Sequence[str], without: Sequence[str]) -> str:
    """Return the entries of a lock that another lock has too, or whose name fits a pattern of `also`."""
    entries = re.findall(r"^[a-z0-9][^\n]*(?:\n[ \t]+[^\n]*)*", lock, re.MULTILINE)
    names = set(re.findall(r"^([a-z0-9._-]+)==", needed or "", re.MULTILINE))

    def fits(name: str) -> bool:
        listed = needed is None or name in names
        return listed or any(fnmatch.fnmatch(name, pattern) for pattern in also)

    chosen = [(entry.split("==")[0], entry) for entry in entries]
    return "".join(f"{entry}\n" for name, entry in chosen if fits(name) and name not in without)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is visible only when it is complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def split(wheels: Path, pins: str, out: Path, part_bytes: int) -> int:
    """Cut wheels into parts, and return their number. Parts that exist and have the right bytes are kept."""
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(wheels.glob("*.whl"))
    parts: list[str] = []
    rest = bytearray()

    def write_part(content: bytes) -> None:
        parts.append(hashlib.sha256(content).hexdigest())
        path = out / f"part-{len(parts):03d}"
        if not path.exists() or digest(path) != parts[-1]:
            write_whole(path, content)

    for path in files:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                rest += block
                while len(rest) >= part_bytes:
                    write_part(bytes(rest[:part_bytes]))
                    del rest[:part_bytes]
    if rest:
        write_part(bytes(rest))
    described = [{"name": p.name, "bytes": p.stat().st_size, "sha256": digest(p)} for p in files]
    index = {"wheels": described, "parts": parts, "pins": pins}
    write_whole(out / INDEX, json.dumps(index, indent=1).encode())
    return len(parts)


def join(parts: Path, wheels: Path) -> list[str]:
    """Take the parts that have come into `wheels`, and return the names of those missing. If none is, write the wheels."""
    index: dict[str, Any] = json.loads((parts / INDEX).read_text())
    wheels.mkdir(parents=True, exist_ok=True)
    missing = []
    for number, expected in enumerate(index["parts"], 1):
        path, kept = parts / f"part-{number:03d}", wheels / f"part-{number:03d}-{expected[:16]}"
        if not kept.exists() and path.exists() and digest(path) == expected:
            write_whole(kept, path.read_bytes())
        if not kept.exists():
            missing.append(path.name)
    if missing:
        return missing
    stream = (
        (wheels / f"part-{number:03d}-{expected[:16]}").read_bytes()
        for number, expected in enumerate(index["parts"], 1)
    )
    rest = b""
    for wheel in index["wheels"]:
        temporary = wheels / "wheel.tmp"
        left = wheel["bytes"]
        with temporary.open("wb") as file:
            while left:
                rest = rest or next(stream)
                file.write(rest[:left])
                rest, left = rest[left:], left - min(left, len(rest))
        if digest(temporary) != wheel["sha256"]:
            raise SystemExit(f"{wheel['name']}: the hash differs; remove {wheels} and join again")
        temporary.replace(wheels / wheel["name"])
    (wheels / PINS).write_text(index["pins"])
    return []


def install(wheels: Path, venv: Path) -> None:
    """Install the wheels into an environment, without network. pip checks the hashes of the lock."""
    # Without pip in it: some systems have no ensurepip.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command += ["--python", str(venv / "bin/python"), "install", "--quiet", "--no-compile"]
    command += ["--no-index", "--find-links", str(wheels), "--no-deps", "--no-cache-dir"]
    subprocess.run([*command, "--require-hashes", "-r", str(wheels / PINS)], check=True)


def download(pins: Path, wheels: Path, python: str) -> None:
    """Download the wheels of pins for x86-64 Linux and a version of Python, by the indexes that pip is configured with."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-d", str(wheels)]
    command += ["--python-version", python, "--implementation", "cp"]
    for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5):
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    for name in ("manylinux2014", "manylinux2010", "manylinux1"):
        command += ["--platform", f"{name}_x86_64"]
    subprocess.run([*command, "-r", str(pins)], check=True)


def main() -> None:
    """Split or join."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("lock", type=Path)
    one.add_argument("parts", type=Path)
    one.add_argument("--needed", type=Path, help="lock with the names that are needed")
    one.add_argument("--also", nargs="*", default=[], help="patterns of further names")
    one.add_argument("--without", nargs="*", default=[], help="names to leave out")
    one.add_argument("--part-mb", type=float, default=60.0)
    one.add_argument("--python", default="3.12", help="version on the other machine")
    two = commands.add_parser("join")
    two.add_argument("parts", type=Path)
    two.add_argument("wheels", type=Path)
    two.add_argument("--venv", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "split":
        needed = options.needed and options.needed.read_text()
        pins = select_pins(options.lock.read_text(), needed, options.also, options.without)
        wheels = options.parts.with_name(f"{options.parts.name}-wheels")
        wheels.mkdir(parents=True, exist_ok=True)
        (wheels / PINS).write_text(pins)
        download(wheels / PINS, wheels, options.python)
        count = split(wheels, pins, options.parts, int(options.part_mb * 1e6))
        print(f"{count} parts in {options.parts}")
        return
    missing = join(options.parts, options.wheels)
    if missing:
        print(f"{len(missing)} parts are missing: {missing[0]} …")
        return
    install(options.wheels, options.venv)
    print(f"installed into {options.venv}")


if __name__ == "__main__":
    main()
