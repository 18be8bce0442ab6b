"""`check_run`: reads all that a run has committed and compares every checksum, without the model and without training.

Torch is not imported. Reading goes through the page cache and takes what the drives take.
"""
from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from lohan_ds.block import Block, Chunk
from lohan_ds.errors import StoreError
from lohan_ds.store.block_files import BlockFiles
from lohan_ds.store.checksums import checksum
from lohan_ds.store.commits import read_details
from lohan_ds.store.filenames import CURRENT, KINDS, LOCK, MANIFEST, NEW_SUFFIX, block_file_name, commit_file_name
from lohan_ds.store.manifest import Commit, Damaged, Manifest, blocks_of, read_json, read_manifests
from lohan_ds.store.pieces import PIECE_BYTES
from lohan_ds.store.run_dirs import check_own_directory, lock
from lohan_ds.stripe import even_stripe

_NUM_THREADS = 4


class Damage(NamedTuple):
    """Something that does not read as it was committed."""
    path: str
    what: str
    offset: int | None = None     # bytes; None: the file as a whole
    nbytes: int | None = None     # from `offset` on
    block: str | None = None      # its name; None for what belongs to no block
    chunk: int | None = None
    kind: str | None = None       # "params" or "state"


@dataclass(frozen=True)
class Report:
    """What was found. `commit` None: it could not be read, see `damages`; then nothing else was looked at."""
    run_dirs: tuple[str, ...]
    manifest: Manifest | None
    commit: Commit | None
    damages: tuple[Damage, ...]
    unexpected: tuple[str, ...] = ()      # paths of files that no run of this version makes
    bytes_checked: int = 0


class _Piece(NamedTuple):
    files: BlockFiles
    chunk: Chunk
    directory: int
    path: str
    offset: int               # bytes, in the file
    nbytes: int
    needed: int               # checksum


def check_run(run_dirs: Sequence[str], on_block: Callable[[Block], None] = lambda block: None) -> Report:
    """`run_dirs`: of one run, all of them, in the order of striping. Takes its lock, blocks for as long as reading
    takes; `on_block` is called before the data of each block.

    StoreError if it cannot be checked: in use, not our own, a directory missing, never committed, another version.
    """
    with ExitStack() as locks:
        for path in run_dirs:
            check_own_directory(path)
            locks.callback(os.close, lock(path))
        manifest = commit = None
        try:
            manifest = read_manifests(run_dirs)
            if manifest is None:
                raise StoreError(errno.ENOENT, "this run was cut off before its first commit: nothing to check",
                                 run_dirs[0])
            commit = read_json(os.path.join(run_dirs[0], CURRENT), Commit)
            if commit.run_id != manifest.run_id:
                raise Damaged("it is of another run", os.path.join(run_dirs[0], CURRENT))
            checksums, _ = read_details(run_dirs[0], commit)
        except Damaged as error:
            damage = Damage(error.filename, error.strerror.removeprefix("damaged: "))
            return Report(tuple(run_dirs), manifest, commit, (damage,))
        unexpected = tuple(_unexpected(run_dirs, manifest))
        if commit.dirty:   # what lies there was written after its checksums
            return Report(tuple(run_dirs), manifest, commit, (), unexpected)
        damages, bytes_checked = _check_data(run_dirs, manifest, commit, memoryview(checksums), on_block)
        return Report(tuple(run_dirs), manifest, commit, tuple(damages), unexpected, bytes_checked)


def _check_data(run_dirs: Sequence[str], manifest: Manifest, commit: Commit, checksums: memoryview,
                on_block: Callable[[Block], None]) -> tuple[list[Damage], int]:
    damages, bytes_checked = [], 0
    stripe = manifest.stripe or even_stripe(len(run_dirs))
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="lohan-check") as executor:
        for block, slot in zip(blocks_of(manifest), commit.slots):
            on_block(block)
            for kind in _kinds(block):
                files = BlockFiles(block, kind, stripe, slot if _num_slots(manifest, block) == 2 else None)
                files.checksums.set_bytes(checksums[:files.checksums.nbytes])
                checksums = checksums[files.checksums.nbytes:]
                wrong = {directory: damage for directory in range(len(run_dirs))
                         if (damage := _check_size(files, run_dirs, directory)) is not None}
                damages += wrong.values()
                pieces = [piece for piece in _pieces(files, run_dirs) if piece.directory not in wrong]
                damages += filter(None, executor.map(_check_piece, pieces))
                bytes_checked += sum(piece.nbytes for piece in pieces)
    return damages, bytes_checked


def _pieces(files: BlockFiles, run_dirs: Sequence[str]) -> Iterator[_Piece]:
    for chunk in files.block.chunks:
        directory, start = files.place(chunk)
        path, record_bytes = os.path.join(run_dirs[directory], files.file_name), files.record_bytes(chunk)
        for number, needed in enumerate(files.checksums.of_record(chunk.index, record_bytes)):
            first = number * PIECE_BYTES
            yield _Piece(files, chunk, directory, path, start + first, min(PIECE_BYTES, record_bytes - first), needed)


def _check_size(files: BlockFiles, run_dirs: Sequence[str], directory: int) -> Damage | None:
    path, needed_bytes = os.path.join(run_dirs[directory], files.file_name), files.nbytes_in(directory)
    if not needed_bytes:
        return None
    try:
        found = os.lstat(path)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    else:
        if not stat.S_ISREG(found.st_mode):
            what = "not a file"
        elif found.st_size != needed_bytes:
            what = f"needed {needed_bytes} bytes, got {found.st_size}"
        else:
            return None
    return Damage(path, what, block=files.block.name, kind=files.kind)


def _check_piece(piece: _Piece) -> Damage | None:
    """In one of several threads."""
    try:
        fd = os.open(piece.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = os.pread(fd, piece.nbytes, piece.offset)
            os.posix_fadvise(fd, piece.offset, piece.nbytes, os.POSIX_FADV_DONTNEED)   # nobody reads it twice
        finally:
            os.close(fd)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    else:
        if (got := checksum(data)) == piece.needed:
            return None
        what = f"checksum needed {piece.needed:016x}, got {got:016x}"
    return Damage(piece.path, what, piece.offset, piece.nbytes, piece.files.block.name, piece.chunk.index,
                  piece.files.kind)


def _unexpected(run_dirs: Sequence[str], manifest: Manifest) -> Iterator[str]:
    """Files that a run which is not in use does not have."""
    blocks = {block_file_name(block.index, kind, slot) for block in blocks_of(manifest) for kind in _kinds(block)
              for slot in (range(2) if _num_slots(manifest, block) == 2 else (None,))}
    records = {MANIFEST, CURRENT, commit_file_name(0), commit_file_name(1)}
    known = blocks | records | {record + NEW_SUFFIX for record in records} | {LOCK}   # a record may be cut off
    for path in run_dirs:
        yield from sorted(entry.path for entry in os.scandir(path) if entry.name not in known)


def _kinds(block: Block) -> tuple[str, ...]:
    """In the order in which a commit has their checksums."""
    return KINDS if block.trainable else KINDS[:1]


def _num_slots(manifest: Manifest, block: Block) -> int:
    return 2 if manifest.durability == "shadow" and block.trainable else 1
