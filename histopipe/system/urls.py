"""URLs of files, and texts without their secrets.

A URL may be signed: everything after `?` and before `@` is a secret, and is in no message, log or record.
"""

from __future__ import annotations

import os
import re

from histopipe.errors import UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


_SECRETS = re.compile(
    "ACCESS_KEY|SECRET|TOKEN|ACCOUNT_KEY|STORAGE_KEY|CONNECTION_STRING|PASSWORD|CREDENTIAL"
)


def is_web(url: str) -> bool:
    """Return whether a URL is that of a web server."""
    return url.startswith(("http://", "https://"))


def is_url(text: object) -> bool:
    """Return whether a source is a URL such as `s3://bucket/slides/` or `https://host/slide.svs`."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


MLFLOW_PLACES = ("databricks", "databricks-uc", "uc")
"""MLflow's own words for a place."""


def check_track(track: str, name: str = "--track") -> None:
    """Raise a UsageError if a value of `--track` is not "mlflow" or "mlflow:URI", or if its URI has a user."""
    tool, _, uri = track.partition(":")
    has_user = re.search(r"//[^/]*@", uri) is not None
    if tool != "mlflow" or has_user:
        raise UsageError(
            name,
            found="a user in the URI" if has_user else repr(track),
            expected="mlflow, or mlflow:URI with the URI of a server or a folder",
            todo="name the user by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )


def public_url(url: str) -> str:
    """Return a URL without user name, password, query and fragment.

    Example:
        >>> public_url("https://me:secret@host/a.svs?X-Amz-Signature=abc")
        'https://host/a.svs'
    """
    scheme, _, rest = url.partition("://")
    # Except on the web, names may contain these characters.
    query = "[?#]" if is_web(url) else r"\?(?=[^/]*=)"
    host, slash, path = re.split(query, rest)[0].partition("/")
    if is_web(url) or ":" in host.partition("@")[0]:
        host = host.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{path}"


def without_secrets(text: str) -> str:
    """Return a text in which all URLs are public, and values of environment variables with secrets are replaced."""
    text = _URL.sub(lambda match: public_url(match[0]), text)
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRETS.search(name):  # a shorter value may be in any word
            text = text.replace(value, "***")
    return text
