"""`Checksums`: what every piece of a file's records must read as. In RAM; a commit writes them down.

They are kept beside the data, not in it, so they also find a write that the drive lost: the old record is intact but is
not the one that was committed. XXH3 (64 bits) at memory speed, computed in the I/O threads.
"""
from __future__ import annotations

import errno

import numpy as np
import xxhash

from lohan_ds.errors import StoreError
from lohan_ds.store.pieces import PIECE_BYTES, OnPiece


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


class Checksums:
    """Of the records of one block, kind and slot, by chunk. Any thread; two never write one record at a time."""

    def __init__(self, num_records: int, record_bytes: int):
        """`record_bytes`: of the largest record."""
        self._table = np.zeros((num_records, max(1, -(-record_bytes // PIECE_BYTES))), dtype="<u8")

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def to_bytes(self) -> bytes:
        return self._table.tobytes()

    def set_bytes(self, data: bytes | memoryview) -> None:
        self._table[:] = np.frombuffer(data, dtype="<u8").reshape(self._table.shape)

    def of_record(self, record: int, nbytes: int) -> list[int]:
        """What the pieces of a record of `nbytes` must have, in order."""
        return [int(value) for value in self._table[record, :-(-nbytes // PIECE_BYTES)]]

    def recorder(self, record: int) -> OnPiece:
        """For `ThreadSsdIo.write`: notes what is written."""
        row = self._table[record]

        def note(piece: int, data: memoryview) -> None:
            row[piece] = checksum(data)

        return note

    def verifier(self, record: int, where: str) -> OnPiece:
        """For `ThreadSsdIo.read`: StoreError that names `where`, if not the noted bytes were read."""
        row = self._table[record]

        def verify(piece: int, data: memoryview) -> None:
            got, needed = checksum(data), int(row[piece])
            if got != needed:
                first = piece * PIECE_BYTES
                raise StoreError(errno.EIO, f"{where}: bytes {first} to {first + len(data)} of its record were damaged "
                                            f"on the drive or on the way (checksum needed {needed:016x}, got "
                                            f"{got:016x}); they were not used")

        return verify
