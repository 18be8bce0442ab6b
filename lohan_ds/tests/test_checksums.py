"""A record that does not read as it was written is found, and named, whatever became of it."""
import errno
import random

import pytest

from lohan_ds.errors import StoreError
from lohan_ds.store import pieces
from lohan_ds.store.checksums import Checksums, Records, checksum
from lohan_ds.store.pieces import parts

PIECE = 64


@pytest.fixture
def table(monkeypatch):
    """Of three records of two pieces and a half."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)
    return Checksums(3, 2 * PIECE + PIECE // 2)


def _pieces(record):
    return [memoryview(record)[start:start + PIECE] for start in range(0, len(record), PIECE)]


def _each_part(table, index, record):
    records = Records(table, index, 1, 1, len(record), "state of block 3 (layer), chunk {}".format)
    for part in parts(0, len(record), len(record), len(record)):
        yield records, part, memoryview(record)[part.in_memory:part.in_memory + part.nbytes]


def _write(table, index, record):
    for records, part, data in _each_part(table, index, record):
        records.note(part, data)


def _read(table, index, record):
    for records, part, data in _each_part(table, index, record):
        records.verify(part, data)


def test_every_flipped_bit_is_found_and_named(table):
    record = bytearray(random.Random(0).randbytes(2 * PIECE + PIECE // 2))
    _write(table, 1, record)
    _read(table, 1, record)
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        first = bit // 8 // PIECE * PIECE
        with pytest.raises(StoreError, match=rf"state of block 3 \(layer\), chunk 1: bytes {first} to ") as caught:
            _read(table, 1, record)
        assert caught.value.errno == errno.EIO and "not used" in str(caught.value)
        record[bit // 8] ^= 1 << bit % 8
    _read(table, 1, record)


def test_a_write_that_the_drive_lost_is_found(table):
    old, new = (random.Random(seed).randbytes(2 * PIECE) for seed in (1, 2))
    _write(table, 0, old)
    _write(table, 0, new)
    with pytest.raises(StoreError, match="damaged on the drive"):
        _read(table, 0, old)                          # whole, but not what was written last
    with pytest.raises(StoreError, match=f"bytes {PIECE} to {2 * PIECE}"):
        _read(table, 0, new[:PIECE] + old[PIECE:])    # half of it arrived


def test_records_do_not_answer_for_each_other(table):
    records = [random.Random(seed).randbytes(PIECE + 8) for seed in range(3)]
    for index, record in enumerate(records):
        _write(table, index, record)
    for index, record in enumerate(records):
        _read(table, index, record)
        with pytest.raises(StoreError):
            _read(table, (index + 1) % 3, record)     # a read from the wrong place


def test_it_comes_back_from_its_bytes(table):
    record = random.Random(4).randbytes(2 * PIECE + PIECE // 2)
    _write(table, 2, record)
    again = Checksums(3, len(record))
    assert len(table.to_bytes()) == table.nbytes == again.nbytes == 3 * 3 * 8
    again.set_bytes(memoryview(table.to_bytes()))
    _read(again, 2, record)
    assert again.of_record(2, len(record)) == [checksum(piece) for piece in _pieces(record)]
    assert again.of_record(2, PIECE) == [checksum(record[:PIECE])]
