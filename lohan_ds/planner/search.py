"""The search for a plan: the best one that fits, or an error that says what would.

A request allows a `_Space` of plans (choices per decision, best first). A plan fits when every tier has the
bytes `memory_model.needs` counts. Widening a space is how "which setting would make it fit" is answered: the
same search runs again over the wider space, and what then differs from the request is the change.
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from lohan_ds.block import PAGE_NUMEL, Block, chunk_numel_for
from lohan_ds.config import AUTOMATIC
from lohan_ds.errors import CapacityError
from lohan_ds.plan import ActivationPlan, Durability, LossTiles, OffloadPlan, Tier, UpdateMode
from lohan_ds.planner.memory_model import (format_bytes, missing_bytes, needs, num_chunk_buffers, table, total_bytes,
                                            update_buffer_bytes)
from lohan_ds.profile import Budgets, MemoryTier, ModelSize
from lohan_ds.stripe import even_stripe, shares_text

AUTO_CHUNK_BYTES = AUTOMATIC["chunk_bytes"]
AUTO_PREFETCH_DEPTH = AUTOMATIC["prefetch_depth"]   # units
# Of the host budget: what is only for speed is not worth a tight one. Where the device has memory of its own, nothing
# grows with the batch on the host.
LUXURY_HOST_SHARE = {True: 0.5, False: 0.9}   # by `unified`
STATE_BYTES_PER_NUMEL = 12          # the inverse of chunk_numel_for: three fp32 arrays
HALVINGS_PER_PREFETCHED_UNIT = 3    # shrink chunks to an eighth before giving up one unit of prefetch
# (param tier, state tier), best first. State moves first: it is 12 of 14 bytes per parameter. The last pair is
# for an SSD too small for the state.
TIER_PAIRS: tuple[tuple[Tier, Tier], ...] = (("host", "host"), ("host", "ssd"), ("ssd", "ssd"), ("ssd", "host"))

BUDGET_KEYS: dict[MemoryTier, str] = {
    "host": "lohan.host_memory", "device": "lohan.device_memory", "ssd": "lohan.ssd_paths"}
SSD_LIMIT_KEY = "lohan.ssd_space"   # the SSD budget's source when the JSON limits it
# What it costs the user to change a setting: lost overlap, then SSD traffic, then another batch layout.
SETTING_COSTS = {"lohan.chunk_bytes": 1, "lohan.prefetch_depth": 2, "lohan.update": 4, "lohan.optimizer_tier": 8,
                 "lohan.param_tier": 16, "gradient_accumulation_steps": 32, "lohan.durability": 64}
# Settings that decide how many bytes lie at rest, and where.
AT_REST_SETTINGS = ("lohan.update", "lohan.optimizer_tier", "lohan.param_tier", "lohan.durability")
# What survives, and what that costs.
DURABILITIES: dict[Durability, str] = {
    "none": "durability none (nothing on SSD outlives the process: no lohan.run_name)",
    "shadow": "durability shadow (after a crash the run goes on at its last committed step, for a second copy on SSD "
              "and one sync per step)",
    "in_place": "durability in_place (the run goes on if it ended in good order; after a crash only its last "
                "checkpoint is left, for no second copy)"}
# What it costs to raise a budget, per byte: a number in the JSON, an SSD, RAM, a bigger device.
RAISE_COSTS = {"json": 1, "ssd": 10, "host": 500, "device": 10000}


@dataclass(frozen=True)
class PlanRequest:
    """What the user forced (or left to us: None)."""
    param_tier: Tier | None
    optimizer_tier: Tier | None
    update: UpdateMode | None     # None (as "auto"): shadow slots if they fit beside the best plan, else deferred
    prefetch_depth: int | None    # units; None starts at 2 and goes down to 0 as needed
    chunk_bytes: int | None       # of a state record; None starts at 16 MiB and halves as needed
    accumulation: int             # micro-steps per step; more than 1 holds gradients in fp32
    durability: Durability | None = "none"   # None: shadow if it fits, else in_place; both keep every tier on SSD
    activations: ActivationPlan = ActivationPlan()
    loss_tiles: LossTiles | None = None
    num_ssds: int = 0             # directories


@dataclass(frozen=True)
class Change:
    """One thing to change: the JSON key and its new value (for a budget, bytes)."""
    key: str
    value: int | str
    remark: str = ""

    def __str__(self) -> str:
        if self.key == BUDGET_KEYS["ssd"]:
            return f'"{self.key}": paths with {self.value} bytes free{self.remark}'
        return f'"{self.key}": {json.dumps(self.value)}{self.remark}'


def make_plan(model: ModelSize, request: PlanRequest, budgets: Budgets) -> tuple[OffloadPlan, tuple[Block, ...]]:
    """The best plan that fits, and the model's blocks cut into chunks of the plan's size.

    Automatic tiers: all on the host when that fits, else optimizer state on the SSD, else params too. Only when no
    tiers fit, automatic chunks shrink and the automatic prefetch depth goes down. What the request names is kept.
    With an automatic update that plan gets shadow slots if they still fit; nothing gives way to them.
    Raises `CapacityError` with the table of the closest plan and the cheapest change that would fit.
    """
    plan = _first_fit(model, _space(request, budgets.ssd_bytes > 0), budgets)
    if plan is None:
        raise CapacityError(_explain(model, request, budgets))
    if request.update in (None, "auto") and plan.shadow:
        plan = replace(plan, update="auto")
    elif request.update in (None, "auto") and plan.durability == "none":
        plan = with_shadow_slots(model, plan, budgets)
    plan = with_read_ahead(model, plan, budgets)
    return plan, tuple(replace(block, chunk_numel=plan.chunk_numel) for block in model.blocks)


def with_shadow_slots(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> OffloadPlan:
    """A deferred plan with update "auto" and the slots for that, if they leave room and can pay; else as it is.

    On SSD a shadow slot costs no traffic, but in memory every update copies what it reads. Where the CPU computes too
    and everything lies in memory, no resource is idle in backward, so it pays for nothing.
    """
    if budgets.unified and "ssd" not in plan.param_tier + plan.state_tier:
        return plan
    with_shadow = replace(plan, update="auto", shadow=True)
    return with_shadow if _leaves_room(model, with_shadow, budgets) else plan


def with_read_ahead(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> OffloadPlan:
    """The plan with as much state read ahead as there is host memory left over for."""
    return replace(plan, num_read_ahead_chunks=_num_read_ahead_chunks(model, plan, budgets))


def check_fits(model: ModelSize, plan: OffloadPlan, budgets: Budgets, advice: str) -> None:
    """For a plan that somebody else made. CapacityError with the table, and `advice`."""
    items = needs(model, plan, budgets.unified)
    totals, missing = total_bytes(items), missing_bytes(items, budgets)
    if any(missing.values()):
        worst = max(missing, key=missing.__getitem__)
        raise CapacityError(f"the plan does not fit: {_lack(worst, totals, budgets)}\n"
                            f"{plan_table(model, plan, budgets)}\n{advice}")


def _lack(tier: MemoryTier, totals: dict[MemoryTier, int], budgets: Budgets) -> str:
    have = budgets.available_bytes(tier)
    return (f"{tier} needs {format_bytes(totals[tier])} ({totals[tier]} bytes), has {format_bytes(have)} "
            f"({have} bytes, {budgets.source(tier)})")


def _tiers(tiers: Sequence[Tier]) -> str:
    """"ssd", or "host (3 blocks) and ssd (5 blocks)"."""
    counts = Counter(tiers)
    if len(counts) < 2:
        return next(iter(counts), "none")
    return " and ".join(f"{tier} ({counts[tier]} block{'s' * (counts[tier] > 1)})" for tier in sorted(counts))


def plan_table(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> str:
    """The plan in one line and its table of needed against available bytes, to print at the start of a run."""
    headline = (f"lohan plan: parameters on {_tiers(plan.param_tier)}, "
                f"optimizer state on {_tiers([plan.state_tier[b.index] for b in model.blocks if b.trainable])}, "
                f"update {plan.update}, {'shadow slots yes, ' if plan.shadow else ''}"
                f"prefetch_depth {plan.prefetch_depth} units, "
                f"chunk_bytes {plan.chunk_numel * STATE_BYTES_PER_NUMEL}, "
                f"gradients held in {'fp32' if plan.accumulate_fp32 else 'the parameters dtype'}, "
                f"{DURABILITIES[plan.durability]}")
    if plan.stripe not in ((), even_stripe(max(plan.stripe, default=0) + 1)):
        headline += f", of what is on SSD each directory has {shares_text(plan.stripe, max(plan.stripe) + 1)}"
    if plan.loss_tiles is not None:
        headline += f", {_told(plan.loss_tiles)}"
    return f"{headline}\n{table(needs(model, plan, budgets.unified), budgets)}"


def _told(tiles: LossTiles) -> str:
    which = "" if not tiles.is_automatic else f" where logits take more than {format_bytes(tiles.whole_logits_bytes)}"
    return f"head and loss in tiles of {tiles.tile_tokens} tokens{which}"


def cheapest_change(model: ModelSize, request: PlanRequest, budgets: Budgets) -> tuple[Change, ...]:
    """The changes that together make a request fit that does not; settings first, then budgets.

    A setting can be changed by an edit of the JSON. So can a budget that the JSON set, if the machine has more; the
    others mean hardware. Bytes named are the least that fit. Found by planning again with the change made.
    """
    for keys in _cheapest_first(_changeable(request, budgets.ssd_bytes > 0)):
        plan = _first_fit(model, _widened(request, budgets.ssd_bytes > 0, keys), budgets)
        if plan is not None:
            return _checked(model, request, budgets, _setting_changes(request, plan))
    return _checked(model, request, budgets, _raises(model, request, budgets))


def apply_changes(request: PlanRequest, budgets: Budgets, changes: tuple[Change, ...]) -> tuple[PlanRequest, Budgets]:
    """What the request and the budgets would be after the user made `changes`."""
    tiers = {**{key: tier for tier, key in BUDGET_KEYS.items()}, SSD_LIMIT_KEY: "ssd"}
    for change in changes:
        tier = tiers.get(change.key)
        if tier is not None:
            budgets = replace(budgets, **{f"{tier}_bytes": change.value})
        elif change.key == "gradient_accumulation_steps":
            request = replace(request, accumulation=change.value)
        else:
            request = replace(request, **{change.key.removeprefix("lohan."): change.value})
    return request, budgets


@dataclass(frozen=True)
class _Space:
    """The plans to choose from: the choices of each decision, best first."""
    param_tiers: tuple[Tier, ...]
    state_tiers: tuple[Tier, ...]
    depths: tuple[int, ...]           # units, falling
    chunk_numels: tuple[int, ...]     # elements, falling
    accumulate_fp32: tuple[bool, ...]
    updates: tuple[UpdateMode, ...]   # "eager" comes with shadow slots
    durabilities: tuple[Durability, ...]   # "shadow" too; "in_place" has none
    activations: ActivationPlan            # as the request says
    loss_tiles: LossTiles | None           # likewise
    num_ssds: int                          # likewise

    def plans(self, num_blocks: int) -> Iterator[OffloadPlan]:
        """Every plan, best first; tiers are tried before smaller chunks and less prefetch."""
        choices = product(range(len(self.accumulate_fp32)), range(len(self.depths)), range(len(self.chunk_numels)))
        settings = sorted(choices, key=lambda s: (s[0], HALVINGS_PER_PREFETCHED_UNIT * s[1] + s[2]))
        pairs = [pair for pair in TIER_PAIRS if pair[0] in self.param_tiers and pair[1] in self.state_tiers]
        for durability, update, (accumulate, depth, chunk), (param_tier, state_tier) in product(
                self.durabilities, self.updates, settings, pairs):
            if update == "eager" and durability == "in_place":
                continue
            yield OffloadPlan((param_tier,) * num_blocks, (state_tier,) * num_blocks, update, self.depths[depth],
                              self.chunk_numels[chunk], num_chunk_buffers(self.num_ssds),
                              self.accumulate_fp32[accumulate], shadow=update == "eager" or durability == "shadow",
                              activations=self.activations, durability=durability, loss_tiles=self.loss_tiles)

    def smallest(self) -> _Space:
        """Without the choices that only cost memory: needs grow with depth, chunk size and shadow slots."""
        durabilities = self.durabilities[:1] if self.updates == ("eager",) else self.durabilities[-1:]
        return replace(self, depths=self.depths[-1:], chunk_numels=self.chunk_numels[-1:], updates=self.updates[-1:],
                       durabilities=durabilities)


def _space(request: PlanRequest, with_ssd: bool) -> _Space:
    durable = request.durability != "none"
    tiers: tuple[Tier, ...] = ("ssd",) if durable else ("host", "ssd") if with_ssd else ("host",)
    return _Space(
        param_tiers=tiers if request.param_tier is None else (request.param_tier,),
        state_tiers=tiers if request.optimizer_tier is None else (request.optimizer_tier,),
        depths=_depths_down(AUTO_PREFETCH_DEPTH) if request.prefetch_depth is None else (request.prefetch_depth,),
        chunk_numels=(_chunk_numels_down(AUTO_CHUNK_BYTES) if request.chunk_bytes is None
                      else (chunk_numel_for(request.chunk_bytes),)),
        accumulate_fp32=(request.accumulation > 1,),
        updates=("deferred",) if request.update in (None, "auto") else (request.update,),
        durabilities=("shadow", "in_place") if request.durability is None else (request.durability,),
        activations=request.activations, loss_tiles=request.loss_tiles, num_ssds=request.num_ssds)


def _widened(request: PlanRequest, with_ssd: bool, keys: tuple[str, ...]) -> _Space:
    """The space of `request` if the user let go of what it forces under `keys`."""
    space = _space(request, with_ssd)
    tiers: tuple[Tier, ...] = ("host", "ssd") if with_ssd and request.durability == "none" else space.param_tiers
    if "lohan.chunk_bytes" in keys:
        space = replace(space, chunk_numels=_chunk_numels_down(request.chunk_bytes))
    if "lohan.prefetch_depth" in keys:
        space = replace(space, depths=_depths_down(request.prefetch_depth))
    if "lohan.update" in keys:
        space = replace(space, updates=("eager", "deferred"))
    if "lohan.durability" in keys:
        space = replace(space, durabilities=("shadow", "in_place"))
    if "lohan.optimizer_tier" in keys:
        space = replace(space, state_tiers=tiers)
    if "lohan.param_tier" in keys:
        space = replace(space, param_tiers=tiers)
    if "gradient_accumulation_steps" in keys:
        space = replace(space, accumulate_fp32=(True, False))
    return space


def _depths_down(depth: int) -> tuple[int, ...]:
    return tuple(range(depth, -1, -1))


def _chunk_numels_down(chunk_bytes: int) -> tuple[int, ...]:
    """Elements per chunk, halved again and again down to one page."""
    numels = [chunk_numel_for(chunk_bytes)]
    while numels[-1] > PAGE_NUMEL:
        numels.append(max(PAGE_NUMEL, numels[-1] // 2 // PAGE_NUMEL * PAGE_NUMEL))
    return tuple(numels)


def _closest(model: ModelSize, space: _Space, budgets: Budgets,
             raise_costs: dict[MemoryTier, int] | None = None) -> OffloadPlan:
    """The plan that lacks fewest bytes; those of tiers in `raise_costs` come second, weighed by their cost."""
    costs = raise_costs or {}

    def lacking(plan: OffloadPlan) -> tuple[int, int]:
        missing = missing_bytes(needs(model, plan, budgets.unified), budgets)
        outside = sum(nbytes for tier, nbytes in missing.items() if tier not in costs)
        return outside, _raise_cost(model, plan, budgets, costs)

    return min(space.smallest().plans(len(model.blocks)), key=lacking)


def _first_fit(model: ModelSize, space: _Space, budgets: Budgets) -> OffloadPlan | None:
    """The best plan of the space that fits; None at once if the smallest ones do not."""
    if not fits(model, _closest(model, space, budgets), budgets):
        return None
    return next(plan for plan in space.plans(len(model.blocks)) if fits(model, plan, budgets))


def fits(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> bool:
    """Whether every tier has what the plan needs."""
    return not any(missing_bytes(needs(model, plan, budgets.unified), budgets).values())


def _leaves_room(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> bool:
    """Fits, and leaves host memory for what nobody could count (activations where memory is shared, user data)."""
    host_bytes = total_bytes(needs(model, plan, budgets.unified))["host"]
    return fits(model, plan, budgets) and host_bytes <= LUXURY_HOST_SHARE[True] * budgets.host_bytes


def _num_read_ahead_chunks(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> int:
    """Of optimizer state on SSD, as many as there is host memory left over for."""
    buffer_bytes = update_buffer_bytes(model, plan)
    on_ssd = [block for block in model.blocks if block.trainable and plan.state_tier[block.index] == "ssd"]
    if plan.update == "serial" or not on_ssd:
        return 0
    used_bytes = total_bytes(needs(model, replace(plan, num_read_ahead_chunks=0), budgets.unified))["host"]
    free_bytes = LUXURY_HOST_SHARE[budgets.unified] * budgets.host_bytes - used_bytes
    num_chunks = sum(-(-block.numel // plan.chunk_numel) for block in on_ssd)
    return max(0, min(num_chunks, int(free_bytes // buffer_bytes)))


def _changeable(request: PlanRequest, with_ssd: bool) -> tuple[str, ...]:
    """Keys of what the request forces and another value could need less."""
    movable = ("host", "ssd") if with_ssd else ("ssd",)
    forced = {"lohan.chunk_bytes": request.chunk_bytes is not None,
              "lohan.prefetch_depth": bool(request.prefetch_depth),
              "lohan.update": request.update == "eager",
              "lohan.durability": request.durability == "shadow",
              "lohan.optimizer_tier": request.optimizer_tier in movable,
              "lohan.param_tier": request.param_tier in movable,
              "gradient_accumulation_steps": request.accumulation > 1}
    return tuple(key for key, is_forced in forced.items() if is_forced)


def _cheapest_first(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of setting keys, the empty one first, by the cost of changing all of it."""
    subsets = chain.from_iterable(combinations(keys, n) for n in range(len(keys) + 1))
    return sorted(subsets, key=lambda subset: sum(SETTING_COSTS[key] for key in subset))


def _set_in_json(budgets: Budgets, tier: MemoryTier) -> bool:
    """Whether the JSON limits the tier. `ssd_paths` is no limit: naming a disk does not make it bigger."""
    return budgets.source(tier) == (SSD_LIMIT_KEY if tier == "ssd" else BUDGET_KEYS[tier])


def _setting_changes(request: PlanRequest, plan: OffloadPlan) -> tuple[Change, ...]:
    """Where the plan departs from what the request forced."""
    changes = []
    if request.chunk_bytes is not None and plan.chunk_numel != chunk_numel_for(request.chunk_bytes):
        changes.append(Change("lohan.chunk_bytes", plan.chunk_numel * STATE_BYTES_PER_NUMEL))
    if request.prefetch_depth is not None and plan.prefetch_depth != request.prefetch_depth:
        changes.append(Change("lohan.prefetch_depth", plan.prefetch_depth))
    if request.update == "eager" and plan.update != "eager":
        changes.append(Change("lohan.update", plan.update))
    if request.durability == "shadow" and plan.durability != "shadow":
        changes.append(Change("lohan.durability", plan.durability))
    if request.optimizer_tier is not None and plan.state_tier[0] != request.optimizer_tier:
        changes.append(Change("lohan.optimizer_tier", plan.state_tier[0]))
    if request.param_tier is not None and plan.param_tier[0] != request.param_tier:
        changes.append(Change("lohan.param_tier", plan.param_tier[0]))
    if request.accumulation > 1 and not plan.accumulate_fp32:
        changes.append(Change("gradient_accumulation_steps", 1, " (gradients are then held in the parameters' dtype)"))
    return tuple(changes)


def _raises(model: ModelSize, request: PlanRequest, budgets: Budgets) -> tuple[Change, ...]:
    """Budgets to raise: those of the JSON if they are enough, else what costs least, with an SSD if there is none.

    Tiers that were forced may move too, because more SSD is worth nothing otherwise, and "eager" may become deferred
    where that saves hardware; the prefetch depth may only where it saves a bigger device.
    """
    costs = {tier: RAISE_COSTS["json" if _set_in_json(budgets, tier) else tier] for tier in BUDGET_KEYS}
    unchanged = _closest(model, _space(request, budgets.ssd_bytes > 0), budgets,
                         {tier: cost for tier, cost in costs.items() if _set_in_json(budgets, tier)})
    missing = missing_bytes(needs(model, unchanged, budgets.unified), budgets)
    if all(_set_in_json(budgets, tier) for tier in missing if missing[tier]):
        return _budget_changes(model, unchanged, budgets)
    settings = (*AT_REST_SETTINGS, "lohan.prefetch_depth") if missing["device"] else AT_REST_SETTINGS
    keys_sets = _cheapest_first([key for key in _changeable(request, True) if key in settings])
    closest = [_closest(model, _widened(request, True, keys), budgets, costs) for keys in keys_sets]
    plan = min(closest, key=lambda plan: _raise_cost(model, plan, budgets, costs))  # the first of equals
    return _setting_changes(request, plan) + _budget_changes(model, plan, budgets)


def _raise_cost(model: ModelSize, plan: OffloadPlan, budgets: Budgets, costs: dict[MemoryTier, int]) -> int:
    """The missing bytes of the tiers in `costs`, each times its cost."""
    missing = missing_bytes(needs(model, plan, budgets.unified), budgets)
    return sum(nbytes * costs[tier] for tier, nbytes in missing.items() if tier in costs)


def _budget_changes(model: ModelSize, plan: OffloadPlan, budgets: Budgets) -> tuple[Change, ...]:
    items = needs(model, plan, budgets.unified)
    totals, missing, changes = total_bytes(items), missing_bytes(items, budgets), []
    for tier, key in BUDGET_KEYS.items():
        if missing[tier]:
            remark = f" ({format_bytes(totals[tier])}; now {format_bytes(budgets.available_bytes(tier))}"
            if not _set_in_json(budgets, tier):
                remark += f", {budgets.source(tier)}; {format_bytes(missing[tier])} more than there is"
            remark += ")"
            key = SSD_LIMIT_KEY if tier == "ssd" and _set_in_json(budgets, tier) else key
            changes.append(Change(key, totals[tier], remark))
    return tuple(changes)


def _checked(model: ModelSize, request: PlanRequest, budgets: Budgets,
             changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Plans once more with nothing but the named values changed, so that a message never promises too much."""
    request, budgets = apply_changes(request, budgets, changes)
    plan = _first_fit(model, _space(request, budgets.ssd_bytes > 0), budgets)
    assert plan is not None, changes
    return changes


def _explain(model: ModelSize, request: PlanRequest, budgets: Budgets) -> str:
    """The text of the error: what lacks most, the table of the closest plan, the cheapest change."""
    plan = _closest(model, _space(request, budgets.ssd_bytes > 0), budgets)
    items = needs(model, plan, budgets.unified)
    totals, missing = total_bytes(items), missing_bytes(items, budgets)
    worst = max(missing, key=missing.__getitem__)
    changes = " and ".join(str(change) for change in cheapest_change(model, request, budgets))
    return (f"the model does not fit: {_lack(worst, totals, budgets)}\n"
            f"{plan_table(model, plan, budgets)}\n"
            f"The cheapest change that would fit: {changes}")
