"""Run a command and print the largest anonymous resident memory of each of its processes.

    python tools/peak_memory.py -- histopipe ingest slides/ --out patches.lmdb

Anonymous memory (RssAnon) excludes mapped pages of a store, which the kernel can drop. It is sampled every 20 ms, so a
shorter peak can be missed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Run the command, print the peaks to standard error, and return the command's exit code."""
    command = sys.argv[1:]
    if command[:1] == ["--"]:
        command = command[1:]
    code, peaks = peaks_of(command)
    for pid, (kilobytes, name) in sorted(peaks.items(), key=lambda item: -item[1][0]):
        print(f"{kilobytes / 1024:8.1f} MB  {pid}  {name}", file=sys.stderr)
    return code


def peaks_of(command: list[str], *, quiet: bool = False) -> tuple[int, dict[int, tuple[int, str]]]:
    """Run a command. Return its exit code, and by process the peak in kilobytes and the command line."""
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, stdout=output, stderr=output)
    peaks: dict[int, tuple[int, str]] = {}
    while process.poll() is None:
        for pid in _family(process.pid):
            kilobytes, name = _anonymous(pid)
            if kilobytes > peaks.get(pid, (0, ""))[0]:
                peaks[pid] = kilobytes, name
        time.sleep(0.02)
    return process.returncode, peaks


def _family(root: int) -> list[int]:
    """Return the ids of a process and all of its descendants."""
    family = [root]
    for pid in family:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
            with contextlib.suppress(OSError):  # the process has ended
                family += map(int, children.read_text().split())
    return family


def _anonymous(pid: int) -> tuple[int, str]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
    except OSError:
        return 0, ""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return int(fields.get("RssAnon", "0 kB").split()[0]), name


if __name__ == "__main__":
    sys.exit(main())
