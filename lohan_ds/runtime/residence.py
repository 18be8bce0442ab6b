"""`Residence`: where one block of parameters is right now; see [Note: residency] in param_streamer.py."""
from __future__ import annotations

import enum

from torch import Tensor

from lohan_ds.work import Work


class Residency(enum.Enum):
    OFFLOADED = 0
    FETCHING = 1
    RESIDENT = 2


class Residence:
    """Touched by the training thread (and autograd's) under the streamer's lock."""

    def __init__(self) -> None:
        self.state = Residency.OFFLOADED
        self.buffer: Tensor | None = None    # (numel,) block dtype, device
        self.is_lent = False                 # the buffer is the store's own tensor
        self.work: Work | None = None        # of the fetch; its result is an Event or None
        self.version = 0                     # grows with every change that `_version` of its parameters does not show
        self.num_running = 0                 # units whose forward is running and needs it
        self.num_gathered = 0                # GatheredParameters contexts that hold it
        self.seen_versions: list[int] = []   # torch's in-place version of each parameter when fetched
        self.looked_at = False               # its memory was handed out: edits there leave no trace
