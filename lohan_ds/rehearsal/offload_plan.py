"""The planner's `Solution` as the `OffloadPlan` of its rehearsal: what a run would do, over fewer bytes."""
from __future__ import annotations

from dataclasses import replace

from lohan_ds.block import round_up
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.plan import ActivationPlan, OffloadPlan
from lohan_ds.planner.memory_model import update_buffer_bytes
from lohan_ds.planner.plan_layout import lay_out, offload_plan
from lohan_ds.planner.search import with_read_ahead
from lohan_ds.planner.solution import Solution
from lohan_ds.profile import Budgets, HardwareProfile, ModelProfile


def rehearsed_plan(solution: Solution, model: ModelProfile, hardware: HardwareProfile,
                   scaled: ModelProfile) -> OffloadPlan:
    """`model` is at full size. ConfigError for what the runtime does not carry out, LoHan's order not counted: that is
    the eager one, with another protocol."""
    if solution.schedule.update == "barrier":
        solution = replace(solution, schedule=replace(solution.schedule, update="eager"))
    names = [unit.name for unit in model.units]
    plan = offload_plan(lay_out(solution, model, hardware, "model"), model.size.blocks, names,
                        solution.batch.accumulation, model.micro_batch, "the plan")
    plan = with_read_ahead(model.size, plan, Budgets(hardware.host_bytes, hardware.device_bytes, hardware.ssd_bytes,
                                                     hardware.unified, *("",) * 3))
    ahead_bytes = plan.num_read_ahead_chunks * update_buffer_bytes(model.size, plan)
    share = sum(block.numel for block in scaled.size.blocks) / sum(block.numel for block in model.size.blocks)
    plan = replace(plan, chunk_numel=scaled.size.blocks[0].chunk_numel,
                   activations=_scaled_activations(plan.activations, model, scaled))
    buffer_bytes = update_buffer_bytes(scaled.size, plan)
    return replace(plan, num_read_ahead_chunks=int(ahead_bytes * share // buffer_bytes) if buffer_bytes else 0)


def _scaled_activations(plan: ActivationPlan, model: ModelProfile, scaled: ModelProfile) -> ActivationPlan:
    """Space for the same items, each of them rounded up to a page; buffers hold the same share of the largest item."""
    nbytes = {"swap_host": 0, "swap_ssd": 0}
    largest = largest_scaled = 0
    for unit, small, policies in zip(model.units, scaled.units, map(dict, plan.policies)):
        for item, small_item in zip(unit.items, small.items):
            policy = policies.get(item.name)
            if policy in nbytes and item.nbytes:
                nbytes[policy] += round_up(small_item.nbytes, PAGE_BYTES)
            if policy == "swap_ssd":
                largest, largest_scaled = max(largest, item.nbytes), max(largest_scaled, small_item.nbytes)
    buffer_bytes = round_up(-(-plan.buffer_bytes * largest_scaled // largest), PAGE_BYTES) if largest else 0
    return replace(plan, host_bytes=nbytes["swap_host"], ssd_bytes=nbytes["swap_ssd"], buffer_bytes=buffer_bytes,
                   smallest_swap_bytes=0, device_bytes=0)
