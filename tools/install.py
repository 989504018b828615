"""Install the libraries of a lock into the environment of the Python that runs this: by uv, or else by pip.

    ENVIRONMENT/bin/python tools/install.py LOCK

Each file is checked by its hash, and only wheels are installed. uv takes a tenth of pip's time. pip installs it into the
environment first. uv does not read pip's configuration, so indexes and certificates are passed on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

UV_LOCK = Path(__file__).parents[1] / "requirements" / "uv.lock"
_FROM_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""Variable of uv for each setting of pip."""
_SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration, in the order in which they count."""
_NOTICE_SECONDS = 10.0


def pip_settings(listed: str) -> dict[str, str]:
    """Return the settings in the output of `pip config list`, lines such as `global.cert='/etc/cert.pem'`."""
    settings: dict[str, str] = {}
    for section in _SECTIONS:
        for line in listed.splitlines():
            name, separator, value = line.partition("=")
            if separator and name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = value.strip("'\"").replace("\\n", " ")
    return settings


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which uv uses what pip is configured to use."""
    variables = {
        _FROM_PIP[name]: " ".join(value.split())
        for name, value in settings.items()
        if name in _FROM_PIP
    }
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = variables["UV_FIND_LINKS"].replace(" ", ",")
    # As pip: any index may have a version. The hashes in the lock decide.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **variables}


def run(command: Sequence[str], environment: Mapping[str, str], what: str) -> int:
    """Run a command, and show every ten seconds that it goes on. Return its exit status."""
    started = time.monotonic()
    print(what, file=sys.stderr, flush=True)
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        while True:
            try:
                return process.wait(_NOTICE_SECONDS)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - started
                print(f"{what}: {seconds:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Install a lock."""
    lock = Path(sys.argv[1])
    count = sum("==" in line for line in lock.read_text().splitlines())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    hashed = ["--quiet", "--only-binary", ":all:", "--require-hashes", "-r"]
    uv = Path(sys.executable).with_name("uv")
    what = f"installing {count} libraries of {lock}"
    if not uv.exists():
        subprocess.run([*pip, "install", *hashed, UV_LOCK], check=False)
    if uv.exists():
        listed = subprocess.run(
            [*pip, "config", "list"], capture_output=True, text=True, check=False
        )
        environment = uv_environment(pip_settings(listed.stdout))
        command = [str(uv), "pip", "install", "--python", sys.executable, *hashed, str(lock)]
        if run(command, environment, what) == 0:
            return
    print("uv cannot install them: trying pip, which takes longer", file=sys.stderr, flush=True)
    sys.exit(run([*pip, "install", *hashed, str(lock)], {}, what))


if __name__ == "__main__":
    main()
