"""Show slides, patches, labels and predictions in a browser."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from histopipe.errors import NothingToDo, UsageError
from histopipe.system.files import Closing, run_on_error
from histopipe.system.output import Progress, counted, default_progress
from histopipe.system.settings import declared_settings, make_settings, takes
from histopipe.system.worker_pool import count_usable_cores, silence
from histopipe.viewer.collection import open_collection
from histopipe.viewer.options import ViewOptions

_STORE = "patches.lmdb"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - not a default
"""All addresses of this machine, and the one to open."""
_OPEN_FILES = 8192
"""Number of open files and connections that is asked for."""
_BACKLOG = 4096
"""Number of connections that wait to be accepted: browsers and load tests open hundreds at once."""
_END_SECONDS = 15.0


class Viewer(Closing):
    """A running viewer. It ends with `close`, or with the process.

    Attributes:
        url: address of the page, with the token.
        host, port: where the server listens.
        token: secret part of the address.
        slides: number of slides.

    Example:
        >>> with view("patches.lmdb", browser=False) as viewer:  # doctest: +SKIP
        ...     print(viewer.url)
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        stores: Sequence[Path],
        options: ViewOptions,
        untrusted: bool,
        progress: Progress,
    ) -> None:
        try:
            import uvicorn  # noqa: F401

            from histopipe.viewer.draw_page import DRAWING, TISSUE, DrawPage
            from histopipe.viewer.label_page import open_labelling
            from histopipe.viewer.layers import OpenSlides
            from histopipe.viewer.learning import prepare_to_learn
            from histopipe.viewer.server import ViewServer
        except ImportError as error:
            raise UsageError(
                f"the viewer needs {error.name}", todo="pip install 'histopipe[view]'"
            ) from error
        self.host = host = options.host
        self.token = token = options.token or secrets.token_urlsafe(24)
        # The port is taken first: opening the collection may take minutes.
        self._listener = _listener(host, options.port)
        features = None if options.features is None else Path(options.features)
        with run_on_error(self._listener.close):
            self.port = int(self._listener.getsockname()[1])
            self._collection = open_collection(
                paths, stores=stores, features=features, untrusted=untrusted
            )
        for note in self._collection.notes:
            progress.message(note)
        self.slides = len(self._collection.entries)
        address = _ANY.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{address}:{self.port}/{token}/"
        workers = options.workers or min(4, count_usable_cores())
        learns = options.journal is not None and options.features is not None
        prepare = prepare_to_learn if learns else silence
        self._slides = OpenSlides(self._collection, workers, progress.message, prepare)
        with run_on_error(self._release):
            self._labelling = open_labelling(self._slides, options, progress.message)
        server = ViewServer(
            self._slides,
            labelling=self._labelling,
            drawing=DrawPage(
                self._slides,
                {
                    kind: Path(folder)
                    for kind, folder in ((DRAWING, options.annotations), (TISSUE, options.tissue))
                    if folder is not None
                },
            ),
            local=host in _LOOPBACK,
            token=token,
            message=progress.message,
        )
        self._server, self._ended = _server(server.app), threading.Event()
        threading.Thread(target=self._serve, name="viewer", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._server.run([self._listener])
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait until the server ends. Ctrl-C ends it."""
        # Not by `Thread.join`: after Ctrl-C in it, Python takes the thread for ended, and `close` would not wait.
        with self, suppress(KeyboardInterrupt):
            while not self._ended.wait(1.0):
                pass

    def close(self) -> None:
        """End the server and its worker processes."""
        self._server.should_exit = True
        self._ended.wait(_END_SECONDS)
        if self._labelling is not None:
            self._labelling.close()
        self._release()

    def _release(self) -> None:
        self._slides.close()
        self._collection.close()
        self._listener.close()

    def to_json(self) -> dict[str, Any]:
        """Return the address and the number of slides."""
        return {name: getattr(self, name) for name in ("url", "host", "port", "token", "slides")}

    def __str__(self) -> str:
        return f"{self.url}\n{counted(self.slides, 'slide')}; Ctrl-C ends the viewer"


@takes(declared_settings(ViewOptions))
def view(
    *paths: str | Path,
    stores: Sequence[str | Path] = (),
    browser: bool = True,
    untrusted: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Viewer:
    """Start a viewer of slides with their patches, labels, quality and predictions, and open its page in a browser.

    Args:
        paths: stores, finished runs, cross-validations, folders of predictions, slide files, and folders of them;
            patches.lmdb if none is given.
        stores: further stores; by default the stores that the runs name.
        browser: open the page in a browser, if there is a screen.
        untrusted: follow no paths that are named in stores and runs.
        progress: where messages are shown; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe view`. The viewer has
            no passwords: with another `host` than 127.0.0.1, everybody who learns the token can see the slides.

    Returns:
        The running viewer. Its server is a thread of this process.

    Raises:
        UsageError: the extra `view` is not installed, a path cannot be shown, the port is in use, or an option is
            out of range.
        NothingToDo: there is no slide, or no store.
        DamagedStore: a store or predictions cannot be read.
    """
    progress = progress or default_progress()
    options = make_settings(ViewOptions, settings)
    for name in ("annotations", "tissue"):
        folder = Path(getattr(options, name) or "/")
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise UsageError(f"--{name}", found=f"{existing}, which is a file", expected="a folder")
    if options.host not in _LOOPBACK:
        progress.message(
            f"warning: {options.host} can be reached from other machines; everybody who learns the address sees the slides"
        )
    _raise_limit_of_files()
    if not paths and not stores and not Path(_STORE).exists():
        raise NothingToDo(
            f"no store at {_STORE}", todo="pass a store, a run, predictions, or slides"
        )
    viewer = Viewer(
        [Path(path) for path in paths or (() if stores else (_STORE,))],
        stores=[Path(path) for path in stores],
        options=options,
        untrusted=untrusted,
        progress=progress,
    )
    if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(viewer.url)
    return viewer


def _server(app: Any) -> Any:
    """Return the server of an application."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=2,
            backlog=_BACKLOG,
        )
    )


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port.

    Raises:
        UsageError: the port is in use or not allowed, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # without the address
        raise UsageError(
            f"cannot listen on {host}, port {port}",
            found=reason,
            todo="choose another --port, or --port 0 for any free one",
        ) from error


def _raise_limit_of_files() -> None:
    """Allow many connections at once: browsers and load tests open hundreds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
