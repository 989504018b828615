"""The installation of exact versions: uv uses what pip is configured to use, pip is tried last."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import install
import pytest


def test_uv_uses_the_settings_of_pip() -> None:
    listed = """
:env:.cert='/etc/own.pem'
global.cert='/etc/cert.pem'
global.extra-index-url='first\\nsecond'
global.find-links='/wheels /more'
install.no-index='1'
list.format='columns'
"""
    assert install.uv_environment(install.pip_settings(listed)) == {
        "SSL_CERT_FILE": "/etc/own.pem",  # as pip, which takes the environment first
        "UV_INDEX": "first second",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_INDEX": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


@pytest.mark.parametrize("uv_succeeds", [True, False])
def test_pip_is_tried_if_uv_fails(
    uv_succeeds: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Python and uv are scripts that print their arguments."""
    for name, status in (("python", 0), ("uv", int(not uv_succeeds))):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "some.lock").write_text("a==1 \\\n    --hash=sha256:00\nb==2 \\\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["install.py", os.fspath(tmp_path / "some.lock")])
    with nullcontext() if uv_succeeds else pytest.raises(SystemExit, match=r"^0$"):
        install.main()
    out, err = capfd.readouterr()
    hashed = f"--only-binary :all: --require-hashes -r {tmp_path}/some.lock"
    assert f"uv pip install --python {tmp_path}/python --quiet {hashed}" in out
    assert (f"-check install --quiet {hashed}" in out.partition("uv pip")[2]) == (not uv_succeeds)
    assert ("uv cannot install them" in err) == (not uv_succeeds)
    assert "installing 2 libraries" in err
