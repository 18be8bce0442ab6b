"""What a run with a name writes beside its data: what lies there (`Manifest`) and what is committed (`Commit`).

Both are JSON with a checksum of their own, checked before any number in them is believed. Nothing is ever unpickled.
"""
from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from typing import Literal, TypeVar

import pydantic

from lohan_ds.block import Block
from lohan_ds.errors import StoreError
from lohan_ds.store.checksums import checksum
from lohan_ds.store.filenames import CURRENT, MANIFEST, commit_file_name, run_name_of
from lohan_ds.stripe import Stripe

FORMAT = 1   # of all files of a run


class SlotEntry(pydantic.BaseModel, frozen=True):
    """Of a parameter: as `ParamSlot`."""
    name: str
    shape: tuple[int, ...]
    group: int | None


class BlockEntry(pydantic.BaseModel, frozen=True):
    """Of a block: as `Block`."""
    name: str
    dtype: str
    trainable: bool
    numel: int
    params: tuple[SlotEntry, ...]


class _Value(pydantic.BaseModel, frozen=True, extra="forbid"):
    format: int = FORMAT
    run_id: str                       # the same in all directories of a run, and in no other run


class Manifest(_Value):
    """Written once, into every directory, when all blocks have their first values."""
    directory: int                    # which of the run's directories this is, in the order of striping
    num_directories: int
    durability: Literal["shadow", "in_place"]
    chunk_numel: int
    stripe: Stripe = ()               # empty, as in runs of older versions: even
    blocks: tuple[BlockEntry, ...]


class Commit(_Value):
    """The committed state: step, and where it is. The first directory has one, replaced as a whole."""
    number: int                       # of commits before it
    step: int                         # optimizer steps that the state has seen
    slots: tuple[int, ...]            # by block: the slot that holds it
    dirty: bool = False               # data is being changed in place: what lies there is of no step
    last_checkpoint: str | None = None
    bytes_written: int                # to all files of the run since it began
    details_bytes: int                # of the file `commit_file_name(number)`: checksums, then what the trainer gave
    details_checksum: int
    checksums_bytes: int              # of `details_bytes`


_V = TypeVar("_V", bound=_Value)


def describe(blocks: Sequence[Block]) -> tuple[BlockEntry, ...]:
    return tuple(BlockEntry(name=block.name, dtype=block.dtype, trainable=block.trainable, numel=block.numel,
                            params=tuple(SlotEntry(name=slot.name, shape=slot.shape, group=slot.group)
                                         for slot in block.slots)) for block in blocks)


def blocks_of(manifest: Manifest) -> tuple[Block, ...]:
    """The blocks as far as their bytes go: where each parameter lies in them is left out."""
    return tuple(Block(index, entry.name, entry.dtype, entry.trainable, (), entry.numel, manifest.chunk_numel)
                 for index, entry in enumerate(manifest.blocks))


class Damaged(StoreError):
    """Something of a run is not there, or does not read as it was written."""

    def __init__(self, message: str, path: str):
        super().__init__(errno.EIO, f"damaged: {message}", path)


def to_json(value: _Value) -> bytes:
    """One line; the checksum is of the text of the value."""
    text = value.model_dump_json()
    return f'{{"xxh3": "{checksum(text.encode()):016x}", "value": {text}}}\n'.encode()


def read_json(path: str, kind: type[_V]) -> _V:
    """StoreError with the path if the file cannot be read, is Damaged, or is of another version."""
    data = read_file(path)
    head, found, text = data.rstrip(b"\n").removesuffix(b"}").partition(b'"value": ')
    try:
        if not found or json.loads(head + b'"value": 0}').get("xxh3") != f"{checksum(text):016x}":
            raise ValueError("its checksum is another")
        if (version := json.loads(text).get("format")) != FORMAT:
            raise StoreError(errno.EINVAL, f"of format {version}, this version of lohan_ds reads {FORMAT}", path)
        return kind.model_validate_json(text)
    except ValueError as error:
        raise Damaged(str(error), path) from error


def read_file(path: str) -> bytes:
    """StoreError with the path: Damaged if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise Damaged("it is gone", path) from error
    except OSError as error:
        raise StoreError(error.errno, f"cannot read: {error.strerror}", path) from error


def is_unfinished(run_dirs: Sequence[str]) -> bool:
    """Whether what lies there was cut off before its first commit, so that there is nothing to lose.

    The first directory gets its manifest before the others do. StoreError if that manifest cannot be read.
    """
    found = [os.path.lexists(os.path.join(path, MANIFEST)) for path in run_dirs]
    if not any(found):
        return True
    if not found[0] or not is_uncommitted(run_dirs[0]):
        return False
    manifests = [read_json(os.path.join(path, MANIFEST), Manifest) for path, is_there in zip(run_dirs, found)
                 if is_there]
    return (manifests[0].directory, manifests[0].num_directories) == (0, len(run_dirs)) \
        and len({manifest.run_id for manifest in manifests}) == 1


def is_uncommitted(first_dir: str) -> bool:
    """Of the directory that would have the commits. The first one leaves `CURRENT`, the second one another file too: a
    run that has been trained has more than one sign of it."""
    return not any(os.path.lexists(os.path.join(first_dir, name)) for name in (CURRENT, commit_file_name(1)))


def read_manifests(run_dirs: Sequence[str]) -> Manifest | None:
    """Of the run in these directories, in this order; None if there is none that was ever committed.

    StoreError if they are not all of one run, in the order in which it was made.
    """
    if is_unfinished(run_dirs):
        return None
    found = [os.path.lexists(os.path.join(path, MANIFEST)) for path in run_dirs]
    if not all(found):
        raise StoreError(errno.ENOENT, f"part of this run is missing: {run_dirs[found.index(True)]} has a manifest, "
                                       f"this has none. Is the drive mounted? {how_to_give_up(run_dirs)}",
                         run_dirs[found.index(False)])
    manifests = [read_json(os.path.join(path, MANIFEST), Manifest) for path in run_dirs]
    for place, (path, manifest) in enumerate(zip(run_dirs, manifests)):
        if manifest.run_id != manifests[0].run_id:
            raise StoreError(errno.EINVAL, f"belongs to another run than {run_dirs[0]}", path)
        if (manifest.directory, manifest.num_directories) != (place, len(run_dirs)):
            raise StoreError(
                errno.EINVAL, f"is directory {manifest.directory + 1} of {manifest.num_directories} of its run, not "
                              f"{place + 1} of {len(run_dirs)}; name lohan.ssd_paths as at first", path)
    if not os.path.lexists(os.path.join(run_dirs[0], CURRENT)):
        raise Damaged(f"its commit record {CURRENT} is gone. {how_to_give_up(run_dirs)}", run_dirs[0])
    return manifests[0]


def how_to_give_up(run_dirs: Sequence[str]) -> str:
    """The command that removes a run, for messages."""
    parents = " ".join(os.path.dirname(path) for path in run_dirs)
    return f"To give the run up: lohan store clean {parents} --run {run_name_of(os.path.basename(run_dirs[0]))}"


def check_same_model(manifest: Manifest, blocks: Sequence[Block]) -> None:
    """StoreError with the first difference if a run's blocks are not those of this model."""
    ours = describe(blocks)
    for place, (mine, theirs) in enumerate(zip(ours, manifest.blocks)):
        if mine == theirs:
            continue
        for a, b in zip(mine.params, theirs.params):
            if a != b:
                raise StoreError(f"the run holds another model: parameter {b.name} {list(b.shape)} in optimizer group "
                                 f"{b.group}, here it is {a.name} {list(a.shape)} in group {a.group}")
        raise StoreError(f"the run holds another model: block {place} is {theirs.name}, {theirs.dtype}, "
                         f"{len(theirs.params)} parameters, {'trained' if theirs.trainable else 'frozen'}; here it is "
                         f"{mine.name}, {mine.dtype}, {len(mine.params)} parameters, "
                         f"{'trained' if mine.trainable else 'frozen'}")
    if len(ours) != len(manifest.blocks):
        raise StoreError(f"the run holds another model: it has {len(manifest.blocks)} blocks, this one {len(ours)}")
