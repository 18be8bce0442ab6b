"""A solution becomes a file that names every block and item, and the file a plan: the same counts, bytes and order."""
from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from lohan_ds.block import make_block
from lohan_ds.errors import CapacityError, ConfigError
from lohan_ds.planner import footprint
from lohan_ds.planner.memory_model import DEVICE_ACTIVATIONS, needs, total_bytes
from lohan_ds.planner.placement import spread
from lohan_ds.planner.plan_file import block_names, dump_plan, load_plan, save_plan
from lohan_ds.planner.plan_layout import lay_out, offload_plan
from lohan_ds.planner.program import solve
from lohan_ds.planner.search import check_fits, plan_table, with_read_ahead
from lohan_ds.planner.solution import Batch, Choices
from lohan_ds.profile import ActivationItem, Budgets
from lohan_ds.tests.planner_cases import MB, machine, small_model

MODEL = small_model(num_units=8, items=((4 * MB, 8e9), (3 * MB, 1e6)))
NAMES = [unit.name for unit in MODEL.units]
RUNTIME = Choices((Batch(2),), param_tiers=("host", "ssd"))
# Little memory: state on both tiers, activations that are kept and others that are not.
TIGHT = machine(host_bytes=110 * MB, device_bytes=45 * MB, device_flops_per_s=1e14, ssd_bytes=10**9)


@pytest.fixture(scope="module")
def solution():
    found = solve(MODEL, TIGHT, RUNTIME)
    assert {tier for counts in found.placement.states for tier in counts} == {"host", "ssd"}
    assert len({tier for counts in found.placement.activations for tier in counts}) > 1
    return found


@pytest.fixture
def file(solution):
    return lay_out(solution, MODEL, TIGHT, "small")


def plan_of(file, blocks=MODEL.size.blocks, names=NAMES, accumulation=1, micro_batch=2):
    return offload_plan(file, blocks, names, accumulation, micro_batch, "plan.json")


def test_the_plan_has_the_counts_of_the_solution(solution, file):
    plan = plan_of(file)
    for tiers, placed in ((plan.param_tier, solution.placement.params), (plan.state_tier, solution.placement.states)):
        for block_class, counts in zip(solution.groups.blocks, placed):
            assert Counter(tiers[index] for index in block_class.blocks) == counts
    said = Counter((name, policy.removeprefix("swap_")) for unit in plan.activations.policies for name, policy in unit)
    for item_class, counts in zip(solution.groups.items, solution.placement.activations):
        for tier, count in counts.items():
            if tier != "keep":
                assert sum(said[name, tier] for name in {name for _, name in item_class.places}) >= count
    assert sum(n for (_, policy), n in said.items() if policy != "keep") == sum(
        count for counts in solution.placement.activations for tier, count in counts.items() if tier != "keep")
    assert (plan.update, plan.prefetch_depth) == (solution.schedule.update, solution.schedule.prefetch_depth)


def test_the_plan_never_needs_more_than_the_solution_said(solution, file):
    assert solution.fits
    used = total_bytes(needs(MODEL.size, plan_of(file), unified=False))
    assert all(used[tier] <= solution.used_bytes[tier] for tier in used)
    assert used["ssd"] == solution.used_bytes["ssd"]


def test_what_is_kept_counts_on_the_device(file):
    plan = plan_of(file)
    for unified, tier in ((False, "device"), (True, "host")):
        item, = (need for need in needs(MODEL.size, plan, unified) if need.what == DEVICE_ACTIVATIONS)
        assert (item.tier, item.nbytes) == (tier, plan.activations.device_bytes)
    kept = file.model_copy(update={"activations": tuple(
        entry.model_copy(update={"items": {name: item.model_copy(update={"policy": "keep"})
                                           for name, item in entry.items.items()}}) for entry in file.activations)})
    assert plan_of(kept).activations.policies == ()
    assert plan_of(kept).activations.device_bytes == 8 * 9 * MB + file.running_unit_bytes


def test_the_first_blocks_are_the_fastest_and_the_last_items_are_kept(solution, file):
    plan = plan_of(file)
    assert plan.state_tier[0] == "host"
    kept = [counts for counts in solution.placement.activations if counts.get("keep")]
    last = file.activations[-1] if NAMES[-1] in file.activations[-1].units else next(
        entry for entry in file.activations if NAMES[-1] in entry.units)
    assert sum(item.policy == "keep" for item in last.items.values()) >= len(kept)
    assert spread({"host": 2, "ssd": 4}, "host") == ("host", "ssd", "ssd", "host", "ssd", "ssd")
    assert spread({"ssd": 2}, "host") == ("ssd", "ssd")


def test_a_file_is_read_back_as_it_was_and_knows_that_it_was_edited(file, tmp_path):
    save_plan(file, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == file and file.is_as_planned
    text = dump_plan(file)
    assert sum('"optimizer_state"' in line for line in text.splitlines()) == 8   # a line per block
    content = json.loads(text)
    content["prefetch_depth"] = 0
    (tmp_path / "plan.json").write_text(json.dumps(content))
    edited = load_plan(tmp_path / "plan.json")
    assert edited.prefetch_depth == 0 and not edited.is_as_planned


def test_rates_without_a_limit_are_read_back(solution, tmp_path):
    unlimited = replace(TIGHT, h2d_bytes_per_s=float("inf"))
    save_plan(lay_out(solution, MODEL, unlimited, "small"), tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").hardware == unlimited


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.update(update="fast"), "update: Input should be"),
    (lambda c: c["blocks"]["unit.3"].update(parameters="tape"), "blocks.unit.3.parameters: Input should be 'host' or"),
    (lambda c: c["activations"][0]["items"]["input"].update(policy="zip"), "got 'zip'"),
    (lambda c: c.update(speed=1), "speed: Extra inputs"),
    (lambda c: c.pop("chunk_bytes"), "chunk_bytes: Field required"),
])
def test_a_wrong_file_is_named_with_its_key(file, tmp_path, change, message):
    content = json.loads(dump_plan(file))
    change(content)
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="wrong.json: is not a plan: ") as error:
        load_plan(tmp_path / "wrong.json")
    assert message in str(error.value)
    with pytest.raises(ConfigError, match="no.json: the plan cannot be read: No such file"):
        load_plan(tmp_path / "no.json")


def test_a_plan_for_another_model_names_the_difference(file):
    other = small_model(num_units=9).size.blocks
    with pytest.raises(ConfigError, match="no place for block unit.8 of the model; plan this one"):
        plan_of(file, other)
    with pytest.raises(ConfigError, match="has no block unit.7; did you mean unit.6"):
        plan_of(file, MODEL.size.blocks[:7])
    with pytest.raises(ConfigError, match="block unit.0 has 1024000 elements of bfloat16 in the plan, 2048 of"):
        plan_of(file, small_model(num_units=8, pages=1).size.blocks)
    with pytest.raises(ConfigError, match="model has no units head, tail"):
        entry = file.activations[0].model_copy(update={"units": ("head", "tail")})
        plan_of(file.model_copy(update={"activations": (entry,)}))
    with pytest.raises(ConfigError, match="unit unit.. is named twice"):
        plan_of(file.model_copy(update={"activations": file.activations + file.activations[:1]}))
    entries = {**file.blocks, "unit.1": file.blocks["unit.1"].model_copy(update={"optimizer_state": None})}
    with pytest.raises(ConfigError, match="unit.1 is trained, but the plan has no optimizer_state"):
        plan_of(file.model_copy(update={"blocks": entries}))


def test_a_plan_for_another_batch_is_refused(file):
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu 2, this run has 3"):
        plan_of(file, micro_batch=3)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 1, this run has 4"):
        plan_of(file, accumulation=4)
    plan_of(file, micro_batch=None)   # unknown


def test_what_is_saved_outside_of_units_is_kept_whatever_it_costs():
    logits = ActivationItem("loss", 8 * MB, 0.0, is_outside=True)
    units = (*MODEL.units[:-1], replace(MODEL.units[-1], items=(*MODEL.units[-1].items, logits)))
    model = replace(MODEL, units=units)
    solution = solve(model, TIGHT, RUNTIME)
    outside, = (counts for item, counts in zip(solution.groups.items, solution.placement.activations)
                if item.is_outside)
    assert outside == {"keep": 1}
    file = lay_out(solution, model, TIGHT, "small")
    assert sum(entry.outside_bytes * len(entry.units) for entry in file.activations) == 8 * MB
    assert not any("loss" in dict(unit) for unit in plan_of(file).activations.policies)


def test_plans_that_the_runtime_cannot_carry_out_are_not_saved():
    on_device = solve(MODEL, machine(), Choices((Batch(2),), param_tiers=("device",)))
    with pytest.raises(ConfigError, match="stay on the device cannot be saved"):
        lay_out(on_device, MODEL, machine(), "small")


def test_a_plan_that_does_not_fit_is_refused_with_its_table(file):
    plan = plan_of(file)
    budgets = Budgets(10 * MB, 10**9, 10**9, False, "lohan.host_memory", "free", "free")
    with pytest.raises(CapacityError, match="the plan does not fit: host needs") as error:
        check_fits(MODEL.size, plan, budgets, "Edit it")
    assert "MISSING" in str(error.value) and str(error.value).endswith("Edit it")
    table = plan_table(MODEL.size, plan, replace(budgets, host_bytes=10**9))
    assert "optimizer state on host (" in table and "blocks) and ssd (" in table
    assert "Not included: your own data" in table


def test_only_state_on_ssd_is_read_ahead(file):
    plan = replace(plan_of(file), update="deferred", shadow=False)
    on_ssd = sum(-(-block.numel // plan.chunk_numel) for block in MODEL.size.blocks
                 if plan.state_tier[block.index] == "ssd")
    budgets = Budgets(10**10, 10**9, 10**10, False, "", "", "")
    assert with_read_ahead(MODEL.size, plan, budgets).num_read_ahead_chunks == on_ssd
    assert on_ssd == 2 * -(-MODEL.size.blocks[0].numel // plan.chunk_numel)


def test_blocks_of_one_unit_have_names_of_their_own():
    blocks = [make_block(i, name, "bfloat16", [("p", (8,), 0)], 2048) for i, name in enumerate("aabab")]
    assert block_names(blocks) == ["a", "a (2)", "b", "a (3)", "b (2)"]


def test_space_of_swapped_items_is_that_of_the_memory_model(file):
    plan, swap = plan_of(file), plan_of(file).activations
    entries = [(item, len(entry.units)) for entry in file.activations for item in entry.items.values()]
    for policy, space in (("host", swap.host_bytes), ("ssd", swap.ssd_bytes)):
        assert space == sum(footprint.swapped_bytes(item.nbytes) * n for item, n in entries if item.policy == policy)
    assert bool(swap.num_buffers) == bool(swap.ssd_bytes)
    assert plan.activations == swap


def test_the_stripe_of_the_rates_is_in_the_plan(solution, file, tmp_path):
    assert file.stripe == () and plan_of(file).stripe == ()
    weighted = lay_out(solution, MODEL, replace(TIGHT, num_ssds=2, ssd_stripe=(0, 1, 0)), "small")
    save_plan(weighted, tmp_path / "plan.json")
    assert plan_of(load_plan(tmp_path / "plan.json")).stripe == (0, 1, 0) and weighted.is_as_planned
    assert not weighted.model_copy(update={"stripe": (0, 1)}).is_as_planned
    content = json.loads(dump_plan(file))
    del content["stripe"]                                        # of an older version
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = load_plan(tmp_path / "old.json")
    assert old.is_as_planned and plan_of(old).stripe == ()
    (tmp_path / "old.json").write_text(json.dumps({**content, "stripe": [0, -1]}))
    with pytest.raises(ConfigError, match="stripe.1: "):
        load_plan(tmp_path / "old.json")
    size, budgets = MODEL.size, Budgets(1 << 40, 1 << 40, 1 << 40, False, "a", "b", "c")
    assert "each directory has 67 %, 33 %" in plan_table(size, plan_of(weighted), budgets)
    assert "each directory" not in plan_table(size, plan_of(file), budgets)
