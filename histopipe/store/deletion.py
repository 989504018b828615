"""Taking slides out of a store: their entries in every database, also in those of a later version.

Every database but `meta` has keys that begin with a slide's number.
"""

from __future__ import annotations

from functools import partial

import lmdb

from histopipe.store.environment import Environment
from histopipe.store.format import META, SLIDES, slide_key

_DELETE_AT_ONCE = 20_000


def delete_entries(environment: Environment, slide: int) -> None:
    """Delete all that is stored of a slide but its record; in bounded transactions, since nothing of it is visible."""
    for database in _holding(environment):
        # Mostly there is nothing, and looking costs no commit.
        while _holds(environment, database, slide):
            environment.change(partial(_delete, environment, database, slide, _DELETE_AT_ONCE))


def delete_slide(environment: Environment, slide: int) -> None:
    """Delete a slide and all that is stored of it, in one transaction: it is there or it is gone."""

    def work(transaction: lmdb.Transaction) -> None:
        for database in [*_holding(environment), SLIDES]:
            _delete(environment, database, slide, None, transaction)

    environment.change(work)


def _holding(environment: Environment) -> list[bytes]:
    """The databases with entries of slides beside their records."""
    return [
        name
        for name, database in environment.databases.items()
        if database is not None and name not in (META, SLIDES)
    ]


def _holds(environment: Environment, database: bytes, slide: int) -> bool:
    with (
        environment.read() as transaction,
        transaction.cursor(db=environment.databases[database]) as cursor,
    ):
        return cursor.set_range(slide_key(slide)) and bytes(cursor.key()) < slide_key(slide + 1)


def _delete(
    environment: Environment,
    database: bytes,
    slide: int,
    most: int | None,
    transaction: lmdb.Transaction,
) -> None:
    """Delete a slide's entries, or so many of them."""
    last = slide_key(slide + 1)
    with transaction.cursor(db=environment.databases[database]) as cursor:
        found = cursor.set_range(slide_key(slide))
        while found and bytes(cursor.key()) < last and most != 0:
            found = cursor.delete() and bool(cursor.key())
            most = most and most - 1
