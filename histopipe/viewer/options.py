"""Options of `view`. The module imports nothing slow, since `--help` lists them."""

from __future__ import annotations

from dataclasses import dataclass

from histopipe.errors import UsageError
from histopipe.system.settings import PathLike, setting

_SERVER, _CONTENTS, _LABELS = "Server", "Contents", "Labels"
_SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """Options of `view`."""

    features: PathLike | None = setting(
        None,
        "Folder of `histopipe embed`, to find similar patches, and to learn from labels.",
        group=_CONTENTS,
        format="path",
    )
    annotations: PathLike | None = setting(
        None,
        "Folder of annotations to show and to draw, one file per slide. It may not exist yet.",
        group=_CONTENTS,
        format="path",
        default_text="no drawing",
    )
    tissue: PathLike | None = setting(
        None,
        "Folder of tissue masks to correct, for `histopipe ingest --tissue`. It may not exist yet.",
        group=_CONTENTS,
        format="path",
        default_text="no corrections",
    )
    journal: PathLike | None = setting(
        None,
        "Folder of labels of patches, to label by keys. It may not exist yet.",
        group=_LABELS,
        format="path",
        default_text="no labelling",
    )
    rater: str | None = setting(
        None,
        "Name in the journal of the person who labels. It is no login.",
        group=_LABELS,
        metavar="NAME",
    )
    classes: tuple[str, ...] = setting(
        (),
        "Classes of a new folder of labels, with keys 1 to 9.",
        group=_LABELS,
        default_text="those of the folder",
    )
    import_labels: PathLike | None = setting(
        None,
        "Labels to begin with, for patches that --rater has never labelled: a table with the columns slide, x_l0, y_l0, and "
        "class, annotation or predicted; or a run or a folder of predictions.",
        group=_LABELS,
        format="path",
        default_text="none",
    )
    seed: int = setting(
        1, "Seed of the held-out patients of a new folder of labels.", group=_LABELS, at_least=0
    )
    host: str = setting("127.0.0.1", "Address to listen on.", group=_SERVER)
    port: int = setting(
        8765, "Port to listen on; 0: any.", group=_SERVER, at_least=0, at_most=65535
    )
    token: str | None = setting(
        None,
        "Secret part of the address, for bookmarks: at least 16 letters, digits, - and _.",
        group=_SERVER,
        default_text="random at each start",
    )
    workers: int | None = setting(
        None,
        "Processes that read slides.",
        group=_SERVER,
        at_least=1,
        default_text="one per core, at most 4",
    )

    def __post_init__(self) -> None:
        if (self.journal is None) != (self.rater is None):
            raise UsageError("--journal and --rater", found="one of them", expected="both, or none")
        token = self.token
        if token is not None and (
            len(token) < _SHORTEST_TOKEN
            or not token.replace("-", "").replace("_", "").isalnum()
            or not token.isascii()
        ):
            raise UsageError(
                "--token",
                found=f"{len(token)} characters",
                expected=f"at least {_SHORTEST_TOKEN} letters, digits, - and _",
            )
        if not self.host:
            raise UsageError("--host", found="nothing", expected="an address, such as 127.0.0.1")
