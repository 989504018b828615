"""Places of values in data.mdb, found without reading the values. For requests to the disk in advance.

LMDB maps the file without the kernel's read-ahead, so each page of a value that is not in the page cache is read by a page
fault of its own: five of them for 20 kB, one after another. A request of the whole value by `posix_fadvise` is one read. It needs
the value's offset, which LMDB's interface does not return, and any access through LMDB's binding touches the value's pages.
Reading values in advance by 16 threads was tried instead: equal where the disk serves as many reads as wanted, but on
a disk limited to 3,000 reads per second it reaches 0.6 of the requests' rate, as page faults are more reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

_NODE_HEADER = 8
_BIG_DATA = 0x01
"""LMDB's flag of a value that has pages of its own."""
_PAGE_HEADER = 16


class _Node(ctypes.Structure):
    _fields_ = (("fields", ctypes.c_uint16 * 4),)


def find_extents(
    transaction: lmdb.Transaction, database: Any, keys: Sequence[bytes]
) -> NDArray[np.int64]:
    """Find where values are in data.mdb, without touching their pages.

    Values that are small enough to be in a page among the keys are left out: finding them has read them.

    Args:
        transaction: a read transaction with buffers.
        database: the database of the keys.
        keys: keys of the values, best in rising order.

    Returns:
        (N, 2) offset and length, bytes, rising; neighbours are joined.
    """
    page_size = int(transaction.stat(database)["psize"])
    found = sorted(_places(transaction, database, keys))
    extents = np.array(found, np.int64).reshape(-1, 2)
    if not len(extents):
        return extents
    first = extents[:, 0] * page_size
    end = first + -(-extents[:, 1] // page_size) * page_size
    starts = np.flatnonzero(np.append(True, first[1:] > end[:-1]))
    return np.stack([first[starts], np.maximum.reduceat(end, starts) - first[starts]], axis=1)


def _places(
    transaction: lmdb.Transaction, database: Any, keys: Sequence[bytes]
) -> Iterator[tuple[int, int]]:
    """Yield the first page of each value, and its length in bytes with that page's header.

    Source:
        LMDB 0.9, mdb.c: the node of a value in a leaf page is 2 × 16 bits of size, 16 of flags, 16 of the key's length, the
        key, and then, if the flag F_BIGDATA is set, the number of the first page of the value.
    """
    with transaction.cursor(db=database) as cursor:
        for key in cursor.getmulti(keys, values=False):  # a view of the key in the mapped page
            address = np.frombuffer(key, np.uint8).__array_interface__["data"][0]
            low, high, flags, length = _Node.from_address(address - _NODE_HEADER).fields
            if flags & _BIG_DATA and length == len(key):
                page = ctypes.c_uint64.from_address(address + length).value
                yield page, (high << 16 | low) + _PAGE_HEADER
