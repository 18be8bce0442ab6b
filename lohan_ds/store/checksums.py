"""`Checksums`: what every piece of a file's records must read as. In RAM; a commit writes them down.

They are kept beside the data, not in it, so they also find a write that the drive lost: the old record is intact but is
not the one that was committed. XXH3 (64 bits) at memory speed, computed in the I/O threads.
"""
from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from lohan_ds.errors import StoreError
from lohan_ds.store import pieces
from lohan_ds.store.pieces import Part


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


class Checksums:
    """Of the records of one block, kind and slot, by chunk. Any thread; two never write one record at a time."""

    def __init__(self, num_records: int, record_bytes: int):
        """`record_bytes`: of the largest record."""
        self._table = np.zeros((num_records, max(1, -(-record_bytes // pieces.PIECE_BYTES))), dtype="<u8")
        self.address = self._table.ctypes.data      # of the table, one row of `row_numel` numbers per record
        self.row_numel = self._table.shape[1]

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def to_bytes(self) -> bytes:
        return self._table.tobytes()

    def set_bytes(self, data: bytes | memoryview) -> None:
        self._table[:] = np.frombuffer(data, dtype="<u8").reshape(self._table.shape)

    def of_record(self, record: int, nbytes: int) -> list[int]:
        """What the pieces of a record of `nbytes` must have, in order."""
        return [int(value) for value in self._table[record, :-(-nbytes // pieces.PIECE_BYTES)]]

    def __getitem__(self, place: tuple[int, int]) -> int:
        return int(self._table[place])

    def __setitem__(self, place: tuple[int, int], value: int) -> None:
        self._table[place] = value


class Records(NamedTuple):
    """The records of one request: neighbours in their file, all of `record_bytes` but the last, which may be shorter.

    They have the numbers first, first + step, ... in `checksums`, and lie `step` records apart in memory.
    """
    checksums: Checksums
    first: int
    count: int
    step: int
    record_bytes: int
    where: Callable[[int], str]   # names a record, by its number in `checksums`

    @property
    def stride_bytes(self) -> int:
        """In memory, from one record's start to the next."""
        return self.step * self.record_bytes

    def note(self, part: Part, data: memoryview) -> None:
        """Before a part is written."""
        self.checksums[self.first + part.record * self.step, part.piece] = checksum(data)

    def verify(self, part: Part, data: memoryview) -> None:
        """After a part was read. StoreError that says where, if those are not the bytes noted."""
        got, needed = checksum(data), self.checksums[self.first + part.record * self.step, part.piece]
        if got != needed:
            raise self.damaged(part.record, part.piece, part.nbytes, got, needed)

    def damaged(self, record: int, piece: int, nbytes: int, got: int, needed: int) -> StoreError:
        """`record`: of the request. What is said of a part that does not read as it was written."""
        first = piece * pieces.PIECE_BYTES
        return StoreError(errno.EIO, f"{self.where(self.first + record * self.step)}: bytes {first} to "
                                     f"{first + nbytes} of its record were damaged on the drive or on the way "
                                     f"(checksum needed {needed:016x}, got {got:016x}); they were not used")
