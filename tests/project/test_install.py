"""The installation of exact versions: locks fit together, uv uses what pip is configured to use, pip is tried last."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import install
import pytest

from helpers.paths import PROJECT

LOCKS = PROJECT / "requirements"


def versions(lock: str) -> dict[str, str]:
    text = (LOCKS / f"{lock}.lock").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^ \\;]+)", text, re.MULTILINE))


@pytest.mark.parametrize(("part", "whole"), [("train", "dev"), ("dev", "nightly")])
def test_a_lock_is_part_of_the_next_one(part: str, whole: str) -> None:
    """They are installed one after the other into one environment."""
    assert versions(part) and versions(part).items() <= versions(whole).items()


def test_uv_uses_the_settings_of_pip() -> None:
    listed = """
:env:.cert='/etc/own.pem'
global.cert='/etc/cert.pem'
global.extra-index-url='first\\nsecond'
global.find-links='/wheels /more'
install.no-index='1'
list.format='columns'
"""
    settings = install.pip_settings(listed)
    assert settings["cert"] == "/etc/own.pem"  # as pip, which takes the environment first
    assert install.uv_environment(settings) == {
        "SSL_CERT_FILE": "/etc/own.pem",
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
    if uv_succeeds:
        install.main()
    else:
        with pytest.raises(SystemExit) as end:
            install.main()
        assert end.value.code == 0
    out, err = capfd.readouterr()
    hashed = f"--only-binary :all: --require-hashes -r {tmp_path}/some.lock"
    assert f"uv pip install --python {tmp_path}/python --quiet {hashed}" in out
    assert (f"-check install --quiet {hashed}" in out.partition("uv pip")[2]) == (not uv_succeeds)
    assert ("uv cannot install them" in err) == (not uv_succeeds)
    assert "installing 2 libraries" in err
