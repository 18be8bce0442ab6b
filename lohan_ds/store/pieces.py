"""How a long request is cut: the unit of I/O on a thread, and of the checksums.

[Note: pieces] A request is of one record, or of several that are neighbours in a file. A piece is at most PIECE_BYTES
of it: as many whole records as fit, else a part of one record. So one large read keeps all threads, and the drive's
queue, busy, and small records do not cost a system call each: 405 MB of a Llama-7B layer are 49 pieces. A *part* is
what has a checksum of its own: a record, or the next PIECE_BYTES of a longer one. ops/csrc/ssd_io/op.h does the same.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 8 << 20


class Part(NamedTuple):
    record: int        # of the request
    piece: int         # of the record, by PIECE_BYTES
    in_memory: int     # bytes from the start of the request's buffer
    nbytes: int


def cut(nbytes: int, record_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of each piece of a request of `nbytes`, whose records but the last have `record_bytes`."""
    many = record_bytes <= PIECE_BYTES
    step = PIECE_BYTES // record_bytes * record_bytes if many else record_bytes
    for start in range(0, nbytes, step):
        end = min(start + step, nbytes)
        for at in range(start, end, PIECE_BYTES):
            yield at, min(PIECE_BYTES, end - at)


def parts(start: int, nbytes: int, record_bytes: int, stride_bytes: int) -> Iterator[Part]:
    """Of the piece of a request that `cut` gives. `stride_bytes`: in memory, from one record's start to the next."""
    at, end = start, start + nbytes
    while at < end:
        record, in_record = divmod(at, record_bytes)
        piece = in_record // PIECE_BYTES
        part_end = min(record * record_bytes + min(record_bytes, (piece + 1) * PIECE_BYTES), end)
        yield Part(record, piece, record * stride_bytes + in_record, part_end - at)
        at = part_end
