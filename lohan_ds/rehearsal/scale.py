"""`Scale`: how much smaller and faster, or slower, a rehearsal is than what it stands for. Values only.

Bytes are divided by one number, seconds by another, FLOPs not at all: what takes a share of a step at full size takes
the same share of the rehearsed step, on every link. Worked numbers: 13B parameters, 26 bytes each on the SSD per
update, at 14.8 GB/s; with a thousandth of the bytes and half of the seconds: 13M parameters at 29.6 MB/s.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from lohan_ds.block import PAGE_NUMEL, Block, make_block, round_up
from lohan_ds.profile import ActivationItem, HardwareProfile, ModelProfile, ModelSize, UnitProfile

CHUNKS_PER_BLOCK = 16           # of the largest: fewer than at full size, because each takes Python a millisecond
MODEL_BYTES = 160 * 10**6       # parameters and optimizer state, as far as nobody says otherwise
UNIT_SECONDS = 0.05             # forward of the unit that most of the compute is in; likewise
DTYPES = {"float32": "float32", "float16": "bfloat16", "bfloat16": "bfloat16"}   # fp16 needs a GPU; as many bytes


@dataclass(frozen=True)
class Scale:
    """Of the rehearsal to full size."""
    bytes: float      # e.g. 0.001
    seconds: float    # e.g. 0.5

    def hardware(self, hardware: HardwareProfile) -> HardwareProfile:
        """Rates only; sizes stay as they are, because the plan was made at full size."""
        bytes_rate, rate = self.bytes / self.seconds, 1 / self.seconds
        return replace(hardware, device_flops_per_s=hardware.device_flops_per_s * rate,
                       h2d_bytes_per_s=hardware.h2d_bytes_per_s * bytes_rate,
                       d2h_bytes_per_s=hardware.d2h_bytes_per_s * bytes_rate,
                       ssd_read_bytes_per_s=hardware.ssd_read_bytes_per_s * bytes_rate,
                       ssd_write_bytes_per_s=hardware.ssd_write_bytes_per_s * bytes_rate,
                       cpu_update_params_per_s=hardware.cpu_update_params_per_s * bytes_rate)

    def model(self, model: ModelProfile) -> ModelProfile:
        """Blocks, items and outputs of fewer bytes; units, names and FLOPs as they are."""
        blocks = [self._block(block) for block in model.size.blocks]
        chunk_numel = round_up(-(-max(block.numel for block in blocks) // CHUNKS_PER_BLOCK), PAGE_NUMEL)
        blocks = tuple(replace(block, chunk_numel=chunk_numel) for block in blocks)
        items = {unit.items: tuple(map(self._item, unit.items)) for unit in model.units}   # alike units share theirs
        units = tuple(self._unit(unit, items[unit.items]) for unit in model.units)
        largest_numel = max(slot.numel for block in blocks for slot in block.slots)
        return replace(model, size=ModelSize(blocks, model.size.units, largest_numel), units=units)

    def _block(self, block: Block) -> Block:
        slots = [(slot.name, (max(1, round(slot.numel * self.bytes)),), slot.group) for slot in block.slots]
        return make_block(block.index, block.name, DTYPES[block.dtype], slots, block.chunk_numel)

    def _item(self, item: ActivationItem) -> ActivationItem:
        return replace(item, nbytes=self.nbytes(item.nbytes))

    def _unit(self, unit: UnitProfile, items: tuple[ActivationItem, ...]) -> UnitProfile:
        return replace(unit, items=items, output_bytes=self.nbytes(unit.output_bytes),
                       workspace_bytes=self.nbytes(unit.workspace_bytes))

    def nbytes(self, nbytes: float) -> int:
        """Of something that is moved as a whole; never 0, unless it was."""
        return max(2, round(nbytes * self.bytes / 2) * 2) if nbytes else 0


def find_scale(model: ModelProfile, hardware: HardwareProfile, nbytes: float | None = None,
               seconds: float | None = None) -> Scale:
    """What is None is chosen so that a machine with little memory and few cores can rehearse the model: bytes are never
    scaled up; seconds are where layers take less than Python needs for them."""
    if nbytes is None:
        nbytes = min(1.0, MODEL_BYTES / sum(block.param_bytes + block.state_bytes for block in model.size.blocks))
    if seconds is None:
        total_flops = sum(unit.forward_flops for unit in model.units)
        typical_flops = sum(unit.forward_flops ** 2 for unit in model.units) / total_flops if total_flops else 0.0
        seconds = UNIT_SECONDS * hardware.device_flops_per_s / typical_flops if typical_flops else 1.0
    return Scale(nbytes, seconds)
