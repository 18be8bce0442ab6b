"""`ItemLedger`: which unit's item each saved storage is counted in, once in the whole model."""
from __future__ import annotations

from typing import NamedTuple

from lohan_ds.profile import ActivationItem

INPUT = "input"


class Claim(NamedTuple):
    """One storage, counted in one item."""
    unit: int
    name: str
    nbytes: int
    flops: int                # to make it again
    is_outside: bool = False  # saved outside of all units


class ItemLedger:
    """Storages are serial numbers of an `OpTrace`; negative ones stand for those of units that did not really run."""

    def __init__(self) -> None:
        self.claims: dict[int, Claim] = {}
        self.saved: set[int] = set()          # storages that autograd keeps; an input may only be needed to recompute
        self._num_anonymous = 0

    def claim(self, storage: int, claim: Claim) -> None:
        """Counts a saved storage, unless it is counted already."""
        self.saved.add(storage)
        self.claims.setdefault(storage, claim)

    def claim_anonymous(self, claim: Claim) -> None:
        """Counts a saved storage that nobody will ask for again."""
        self._num_anonymous += 1
        self.claim(-self._num_anonymous, claim)

    def claim_input(self, storage: int, unit: int, nbytes: int) -> None:
        """Counts a unit's input. If the unit before saved it too, as its own output, it is no longer counted there;
        the first unit that takes it as input keeps it."""
        held = self.claims.get(storage)
        if held is None or held.name != INPUT:
            self.claims[storage] = Claim(unit, INPUT, nbytes, 0)

    def items(self, unit: int) -> tuple[ActivationItem, ...]:
        """Of one unit: the input first, then in the order in which they were claimed."""
        nbytes: dict[str, int] = {}
        flops: dict[str, int] = {}
        outside: set[str] = set()
        for claim in self.claims.values():
            if claim.unit == unit:
                nbytes[claim.name] = nbytes.get(claim.name, 0) + claim.nbytes
                flops[claim.name] = flops.get(claim.name, 0) + claim.flops
                outside |= {claim.name} if claim.is_outside else set()
        names = sorted(nbytes, key=lambda name: name != INPUT)
        return tuple(ActivationItem(name, nbytes[name], float(flops[name]), name == INPUT, name in outside)
                     for name in names)

    @property
    def saved_bytes(self) -> int:
        """What autograd keeps from forward to backward if nothing is swapped or recomputed."""
        return sum(claim.nbytes for storage, claim in self.claims.items() if storage in self.saved)
