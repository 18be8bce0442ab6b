"""`PlanFile`: a plan as JSON to read, edit and pass back: `lohan plan --save-plan FILE`, then "lohan": {"plan": FILE}.

Blocks and units are called as the modules of the model are. What the file decides stands above `predicted`; that is
what the planner expected of just these decisions, and `is_as_planned` says whether it still may. plan_layout.py makes
a file of a solution, and of a file the plan that a run is carried out by. No torch.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from lohan_ds.block import Block
from lohan_ds.config import MIN_CHUNK_BYTES
from lohan_ds.errors import ConfigError
from lohan_ds.plan import Tier, UpdateMode
from lohan_ds.profile import HardwareProfile, MemoryTier

FORMAT = 1
_LINE_WIDTH = 120   # characters of JSON that stay on one line
ItemPolicy = Literal["keep", "host", "ssd", "recompute"]   # as the key "activations" of the config has them


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class BlockEntry(_Entry):
    """Where one block lies between uses."""
    parameters: Tier
    optimizer_state: Tier | None     # None: the block is frozen
    numel: int                       # elements; with the dtype, to recognise the block
    dtype: str


class ItemEntry(_Entry):
    """What becomes of one saved activation of a unit; `plan.ActivationPlan` says what an item is."""
    policy: ItemPolicy
    nbytes: int = Field(ge=0)        # of one unit's, of one micro-batch


class UnitsEntry(_Entry):
    """Units whose activations do the same."""
    units: tuple[str, ...]
    items: dict[str, ItemEntry]
    outside_bytes: int = Field(0, ge=0)   # of one unit, saved outside of all units after it: kept


class PhaseEntry(_Entry):
    """A phase of the step, or phases that overlap."""
    name: str
    seconds: float                   # all times of the step
    binding: str                     # the resource that takes longest


class Predicted(_Entry):
    """What the planner expected of a step."""
    decisions: str                   # which ones: `PlanFile.decisions_key`
    step_s: float
    tokens_per_s: float
    phases: tuple[PhaseEntry, ...]
    moved_bytes: dict[str, int]      # per step: ssd_read, ssd_write, h2d, d2h
    memory_bytes: dict[MemoryTier, int]


class PlanFile(_Entry):
    format: Literal[1] = FORMAT
    model: str                       # for people
    hardware: HardwareProfile        # rates and budgets it was planned with
    micro_batch: int | None = Field(ge=1)        # sequences; None where activations are not planned
    accumulation: int = Field(ge=1)              # micro-batches per step
    sequence_length: int | None = Field(ge=1)    # tokens; None where activations are not planned
    update: UpdateMode
    prefetch_depth: int = Field(ge=0)            # units
    chunk_bytes: int = Field(ge=MIN_CHUNK_BYTES)
    read_ahead_chunks: int | None = Field(None, ge=0)   # None: as many as there is host memory left over for
    blocks: dict[str, BlockEntry]
    activations: tuple[UnitsEntry, ...]          # empty: not planned, all are kept
    stripe: tuple[NonNegativeInt, ...] = ()      # over `ssd_paths`, by place; empty: as measured where it runs, or even
    running_unit_bytes: int = Field(ge=0)        # the most that a unit's own activations take while it runs
    predicted: Predicted | None = None

    @property
    def decisions_key(self) -> str:
        """Equal for files that decide the same for the same model."""
        undecided = set() if self.stripe else {"stripe"}   # files of older versions have none
        decisions = self.model_dump(mode="json", exclude={"predicted", "hardware", "model", *undecided})
        return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def is_as_planned(self) -> bool:
        """Whether `predicted` is of what the file decides; false once somebody edited it."""
        return self.predicted is not None and self.predicted.decisions == self.decisions_key


def block_names(blocks: Sequence[Block]) -> list[str]:
    """One for each: its unit's, and for further blocks of that unit (of another dtype, or frozen) "name (2)"."""
    names: list[str] = []
    for block in blocks:
        number = sum(other.name == block.name for other in blocks[:len(names)]) + 1
        names.append(block.name if number == 1 else f"{block.name} ({number})")
    return names


def dump_plan(file: PlanFile) -> str:
    """As JSON text, with a line per block and item."""
    return _json_lines(json.loads(file.model_dump_json()), "") + "\n"


def save_plan(file: PlanFile, path: str | Path) -> None:
    """OSError if it cannot be written."""
    Path(path).write_text(dump_plan(file))


def load_plan(path: str | Path) -> PlanFile:
    """ConfigError, naming the file and the key, if it is not there or no plan."""
    try:
        return PlanFile.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: the plan cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        got = "" if isinstance(first["input"], (dict, list, bytes)) else f", got {first['input']!r}"
        raise ConfigError(f"{path}: is not a plan: {key}: {first['msg']}{got}") from error


def _json_lines(value: Any, indent: str) -> str:
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or len(indent) + len(flat) <= _LINE_WIDTH and indent:
        return flat
    inner, (opening, closing) = indent + " ", "{}" if isinstance(value, dict) else "[]"
    parts = [f"{json.dumps(key)}: {_json_lines(each, inner)}" for key, each in value.items()] if \
        isinstance(value, dict) else [_json_lines(each, inner) for each in value]
    return f"{opening}\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}{closing}"
