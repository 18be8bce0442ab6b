"""The lohan section and the rest of the JSON beside it. User cases D06, D07, D09, D10, D44, D45."""
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pydantic
import pytest

from lohan_ds import config_checks
from lohan_ds.config import (AUTOMATIC, LohanConfig, check_ssd_paths, config_table, effective_ds_config, format_bytes,
                             ignored_keys, parse, parse_bytes)
from lohan_ds.errors import ConfigError

ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}}
HF_JSON = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
           "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "optimizer": ADAMW,
           "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True}}


def ds_config(dotted=None, value=None, **lohan):
    """A config with a lohan section and one more value at a dotted path."""
    config = {"lohan": lohan}
    if dotted:
        *sections, name = dotted.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return config


def refusal(config):
    """The message that `config` is refused with; it must be one line."""
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def offload(section, **values):
    return {"lohan": {}, "zero_optimization": {"stage": 3, section: values}}


# ---- runs with a name, activations

@pytest.mark.parametrize("values, key, word", [
    ({"run_name": "a"}, "ssd_paths", "missing"), ({"run_name": "../a"}, "run_name", "letters"),
    ({"run_name": "a."}, "run_name", "letters"), ({"run_name": "a" * 65}, "run_name", "letters"),
    ({"durability": "shadow"}, "durability", "run_name"),
    ({"run_name": "a", "durability": "maybe"}, "durability", "got"),
    ({"run_name": "a", "optimizer_tier": "host"}, "optimizer_tier", "crash"),
    ({"run_name": "a", "param_tier": "host"}, "param_tier", "crash"),
    ({"run_name": "a", "durability": "in_place", "update": "eager"}, "update", "in_place"),
    ({"activations": "swap"}, "activations", "got"),
    ({"activations": "ssd", "activation_space": 10**6}, "ssd_paths", "ssd"),
    ({"activations": "host"}, "activation_space", "missing"),
    ({"activation_space": "1GB"}, "activation_space", "without")])
def test_what_cannot_survive_or_be_swapped_is_refused(values, key, word, tmp_path):
    paths = {} if key == "ssd_paths" else {"ssd_paths": str(tmp_path)}
    message = refusal({"lohan": {**paths, **values}})
    assert message.startswith(f"lohan.{key}: ") and word in message


def test_what_can_is_read(tmp_path):
    config = parse({"lohan": {"ssd_paths": str(tmp_path), "run_name": "Llama-3.1_x", "durability": "in_place",
                              "activations": "ssd", "activation_space": "2GB"}})
    assert (config.run_name, config.durability, config.activation_space) == ("Llama-3.1_x", "in_place", 2 * 10**9)


# ---- the section itself

@pytest.mark.parametrize("config", [{}, {"lohan": None}, {"lohan": False}, {"lohan": {"enabled": False}},
                                    {"lohan": {"enabled": "false"}}])
def test_not_enabled_checks_nothing(config):
    config = {**config, "zero_optimization": {"stage": 1, "cpu_offload": True}, "optimizer": {"type": "Muon"}}
    if isinstance(config.get("lohan"), dict):
        config["lohan"]["no_such_key"] = 1
    assert parse(config) is None
    effective = effective_ds_config(config)
    assert effective == config and effective is not config


@pytest.mark.parametrize("section", [True, {}, {"enabled": True}, {"enabled": "auto"}])
def test_enabled(section):
    assert parse({"lohan": section}) == LohanConfig()


@pytest.mark.parametrize("section", [1, "on", "auto", [], 2.5])
def test_section_of_another_type(section):
    assert refusal({"lohan": section}).startswith("lohan: ")


@pytest.mark.parametrize("nothing", ["auto", None])
def test_auto_and_null_in_every_key(nothing):
    section = {name: nothing for name in LohanConfig.model_fields}
    assert parse({**HF_JSON, "lohan": section}) == LohanConfig()
    assert effective_ds_config({**HF_JSON, "lohan": section})["lohan"] == {"enabled": True}


def test_frozen_and_strict_when_built_directly():
    with pytest.raises(pydantic.ValidationError):
        LohanConfig(nvme=1)
    with pytest.raises(pydantic.ValidationError):
        LohanConfig().update = "serial"


def test_with_defaults():
    config = LohanConfig(prefetch_depth=0).with_defaults()
    assert (config.prefetch_depth, config.chunk_bytes, config.ssd_threads) == (0, 2**24, 4)
    assert config.host_memory is None and config.param_tier is None and config.update is None
    assert LohanConfig(**AUTOMATIC) == LohanConfig().with_defaults()


@pytest.mark.parametrize("wrong, right", [("host_memry", "host_memory"), ("ssd_path", "ssd_paths"),
                                          ("prefetch", "prefetch_depth"), ("optimizer_teir", "optimizer_tier")])
def test_unknown_key_names_the_nearest(wrong, right):
    assert refusal(ds_config(**{wrong: 1})) == f"lohan.{wrong}: no such key; did you mean `{right}`?"


def test_unknown_key_far_from_all_lists_all():
    message = refusal(ds_config(zzz=1))
    assert all(name in message for name in LohanConfig.model_fields)


@pytest.mark.parametrize("key, value", [
    ("prefetch_depth", -1), ("prefetch_depth", 1.5), ("prefetch_depth", True), ("prefetch_depth", "two"),
    ("loss_tile_tokens", -1), ("loss_tile_tokens", 1.5), ("loss_tile_tokens", True),
    ("ssd_threads", 0), ("ssd_threads", []), ("update", "lazy"), ("param_tier", "nvme"), ("optimizer_tier", "cpu"),
    ("enabled", "maybe"), ("ssd_paths", 3), ("ssd_paths", [3]), ("ssd_paths", ""), ("ssd_paths", {"a": 1}),
    ("chunk_bytes", 24 * 1024 - 1), ("host_memory", 24), ("update", True)])
def test_bad_values_name_the_key(key, value):
    assert refusal(ds_config(**{key: value})).startswith(f"lohan.{key}")


@pytest.mark.parametrize("update", ["eager", "deferred", "serial"])
def test_update_modes(update):
    config = ds_config(update=update)
    assert parse(config).update == parse(config).with_defaults().update == update
    assert effective_ds_config(config)["lohan"] == {"enabled": True, "update": update}


def test_an_unknown_update_mode_names_the_right_ones():
    assert refusal(ds_config(update="lazy")) == (
        "lohan.update: input should be 'eager', 'deferred' or 'serial', got 'lazy'")


# ---- sizes (D09)

@pytest.mark.parametrize("value, nbytes", [
    (4096, 4096), (1e9, 10**9), (1.5e9, 1_500_000_000), ("12GB", 12 * 10**9), ("12GiB", 12 * 2**30), ("1.5 gb", 1.5e9),
    ("2TB", 2e12), ("2TiB", 2**41), ("64MB", 64e6), ("64MiB", 2**26), ("24KiB", 24 * 1024), ("24KB", 24000),
    ("1e9", 10**9), ("5000 B", 5000)])
def test_sizes(value, nbytes):
    assert parse_bytes(value, "k") == nbytes and isinstance(parse_bytes(value, "k"), int)
    for key in ("host_memory", "device_memory"):
        assert getattr(parse(ds_config(**{key: value})), key) == nbytes


@pytest.mark.parametrize("value", [0, -1, -1.5e9, 0.2, float("nan"), float("inf"), 10**400, "", "GB", "12G", "12 XB",
                                   "-3GB", "0GB", "much", "1e400", True, False, [], {}, "12GB free"])
@pytest.mark.parametrize("key", ["ssd_space", "host_memory", "device_memory", "chunk_bytes"])
def test_nonsense_sizes_name_the_key(key, value):
    message = refusal(ds_config(**{key: value}))
    assert message.startswith(f"lohan.{key}: ") and repr(value) in message


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 999, 24576, 2**24, 13.8e9, 4e12)] == [
        "0 bytes", "999 bytes", "24.6 KB", "16.8 MB", "13.8 GB", "4.0 TB"]


# ---- SSD paths, while the JSON is read (D06)

def test_one_path_as_string(tmp_path):
    assert parse(ds_config(ssd_paths=str(tmp_path), optimizer_tier="ssd")).ssd_paths == [str(tmp_path)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key, value", [("param_tier", "ssd"), ("optimizer_tier", "ssd"), ("ssd_space", "1GB")])
def test_ssd_without_a_path(key, value):
    message = refusal(ds_config(**{key: value}))
    assert message.startswith("lohan.ssd_paths: missing") and f"lohan.{key}" in message


def test_path_that_does_not_exist_or_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    good, missing = str(tmp_path), str(tmp_path / "missing")
    assert refusal(ds_config(ssd_paths=[good, missing])).startswith(f"lohan.ssd_paths[1]: {missing!r} does not exist")
    assert "lohan.ssd_paths[0]" in refusal(ds_config(ssd_paths=str(file))) and "not a directory" in refusal(
        ds_config(ssd_paths=str(file)))


def test_unwritable_path_names_the_owner(tmp_path, monkeypatch):
    def refuse(**kwargs):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    message = refusal(ds_config(ssd_paths=str(tmp_path)))
    assert message.startswith("lohan.ssd_paths[0]: cannot create files") and str(tmp_path) in message
    assert "Permission denied" in message and "belongs to user" in message


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_read_only_file_system():
    assert "cannot create files in '/proc'" in refusal(ds_config(ssd_paths="/proc"))


def test_same_directory_twice(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    message = refusal(ds_config(ssd_paths=[str(tmp_path), str(link)]))
    assert "lohan.ssd_paths[1]" in message and "lohan.ssd_paths[0]" in message


def test_free_space(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 * 10**9}))
    config = LohanConfig(ssd_paths=paths, ssd_space="5GB")
    check_ssd_paths(config)
    message = refusal(ds_config(ssd_paths=paths, ssd_space="6GB"))  # both are on one disk: 5 GB, not 10
    assert message.startswith("lohan.ssd_space: 6.0 GB needed, 5.0 GB free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**6}))
    assert refusal(ds_config(ssd_paths=paths)).startswith(f"lohan.ssd_paths[0]: {paths[0]!r} has 1.0 MB free")


# ---- the rest of the JSON (D10, D44, D45)

@pytest.mark.parametrize("config", [
    {}, {"zero_optimization": None}, {"zero_optimization": {}}, {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": "auto"}}, {"zero_optimization": {"stage": 3.0}}])
def test_stage_three_or_absent(config):
    config = {**config, "lohan": {}}
    assert parse(config) == LohanConfig()
    assert effective_ds_config(config)["zero_optimization"] == {
        "stage": 3, "memory_efficient_linear": False, "stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 4, "3", True])
def test_other_stages(stage):
    message = refusal(ds_config("zero_optimization.stage", stage))
    assert message.startswith("zero_optimization.stage: lohan needs stage 3") and repr(stage) in message


@pytest.mark.parametrize("value", [True, False, 3, "stage3", []])
def test_zero_optimization_of_another_type(value):
    assert refusal({"lohan": {}, "zero_optimization": value}).startswith("zero_optimization: ")


def test_both_precisions():
    assert "fp16.enabled and bf16.enabled" in refusal({"lohan": {}, "fp16": {"enabled": True}, "bf16": {"enabled": 1}})
    for fp16, bf16 in [(True, "auto"), ("auto", "auto"), (True, False), (False, True), ("auto", True)]:
        parse({"lohan": {}, "fp16": {"enabled": fp16}, "bf16": {"enabled": bf16}})


SAMPLES = {config_checks.is_on: (True, False), config_checks.is_off: (False, True), config_checks.is_above_one: (2, 1),
           config_checks.is_not_one: (0.5, 1.0), config_checks.is_given: ({"a": 1}, None)}
SAMPLES_BY_KEY = {"zero_optimization.mics_shard_size": (8, -1), "data_types.grad_accum_dtype": ("bf16", "fp32"),
                  "gradient_allreduce_op": ("sum", "mean"), "optimizer.params.max_grad_norm": (1.0, None)}


@pytest.mark.parametrize("rule", config_checks.RULES, ids=lambda rule: rule.key)
def test_every_rule_refuses_by_name(rule):
    bad, good = SAMPLES_BY_KEY.get(rule.key) or SAMPLES[rule.refused]
    message = refusal(ds_config(rule.key, bad))
    assert message.startswith(f"{rule.key}: {bad!r} ") and message.endswith(rule.advice)
    for harmless in (good, "auto", None):
        parse(ds_config(rule.key, harmless))


@pytest.mark.parametrize("dtype", ["fp16", "float16", "bfloat16", "torch.bfloat16", "int8"])
def test_other_accumulation_types(dtype):
    assert refusal(ds_config("data_types.grad_accum_dtype", dtype)).startswith("data_types.grad_accum_dtype: ")


@pytest.mark.parametrize("name", ["Adam", "adam", "AdamW", "ADAMW", "LoHanAdam", "auto", None])
def test_supported_optimizers(name):
    assert parse({"lohan": {}, "optimizer": {"type": name, "params": ADAMW["params"]}}) == LohanConfig()


@pytest.mark.parametrize("name", ["Muon", "Lion", "Adafactor", "SGD", "Adagrad", "OneBitAdam", "Lamb", "MuAdamW"])
def test_other_optimizers_name_the_supported_ones(name):
    message = refusal({"lohan": {}, "optimizer": {"type": name}})
    assert message.startswith("optimizer.type: ") and name in message and "Adam, AdamW, LoHanAdam" in message


def test_optimizer_params():
    def config(kind, **params):
        return {"lohan": {}, "optimizer": {"type": kind, "params": params}}
    assert "did you mean `weight_decay`?" in refusal(config("AdamW", weight_decy=0.1))
    assert refusal(config("LoHanAdam", adam_w_mode=False)).startswith("optimizer.params.adam_w_mode")
    parse(config("Adam", adam_w_mode=False, torch_adam=True))


def test_usual_hugging_face_json():
    assert parse({**HF_JSON, "lohan": {}}) == LohanConfig()
    full = parse({**HF_JSON, "lohan": {}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
           "steps_per_print": 10, "wall_clock_breakdown": False, "flops_profiler": {"enabled": True},
           "zero_allow_untested_optimizer": True, "data_types": {"param_dtype": "bf16"}})
    assert full == LohanConfig()


# ---- ZeRO-Infinity's keys

def test_offload_to_nvme_is_understood(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = offload("offload_optimizer", device="nvme", nvme_path=str(tmp_path), pin_memory=True, buffer_count=4,
                     fast_init=False, pipeline_read=True, pipeline_write=True, ratio=1.0)
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True, "buffer_size": 1e8,
                                                    "max_in_cpu": 1e8, "nvme_path": "/local_nvme"}
    config["aio"] = {"block_size": 262144, "queue_depth": 32, "thread_count": 2, "single_submit": False,
                     "overlap_events": True}
    expected = LohanConfig(optimizer_tier="ssd", param_tier="host", ssd_paths=[str(tmp_path)], ssd_threads=2)
    assert parse(config) == expected
    config["zero_optimization"]["offload_param"].update(device="nvme", nvme_path=str(tmp_path) + "/", max_in_cpu=1e9)
    assert parse(config).ssd_paths == [str(tmp_path)]
    config["zero_optimization"]["offload_param"].update(nvme_path=str(other))
    assert parse(config).ssd_paths == [str(tmp_path), str(other)]
    config["lohan"] = {"ssd_threads": 8, "ssd_paths": [str(other), str(tmp_path)], "param_tier": "ssd"}
    assert parse(config).ssd_threads == 8 and parse(config).ssd_paths == [str(other), str(tmp_path)]


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_offload_that_says_nothing(section):
    for values in ({"device": "none"}, {"device": "none", "nvme_path": "none"}, {"device": "auto"}, {}):
        assert parse(offload(section, **values)) == LohanConfig()


@pytest.mark.parametrize("section, tier", [("offload_optimizer", "optimizer_tier"), ("offload_param", "param_tier")])
def test_offload_contradictions_name_both_keys(section, tier, tmp_path):
    nvme = offload(section, device="nvme", nvme_path=str(tmp_path))
    key = f"zero_optimization.{section}"
    message = refusal({**nvme, "lohan": {tier: "host"}})
    assert f"lohan.{tier}" in message and f"{key}.device" in message
    message = refusal({**offload(section, device="cpu"), "lohan": {tier: "ssd", "ssd_paths": str(tmp_path)}})
    assert f"lohan.{tier}" in message and f"{key}.device" in message
    message = refusal({**nvme, "lohan": {"ssd_paths": ["/elsewhere"]}})
    assert "lohan.ssd_paths" in message and f"{key}.nvme_path" in message


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_offload_refusals(section, tmp_path):
    key = f"zero_optimization.{section}"
    for path in ({}, {"nvme_path": None}, {"nvme_path": "none"}, {"nvme_path": "auto"}):
        assert refusal(offload(section, device="nvme", **path)).startswith(f"{key}.nvme_path: missing")
    parse({**offload(section, device="nvme"), "lohan": {"ssd_paths": str(tmp_path)}})
    missing = str(tmp_path / "missing")
    assert refusal(offload(section, device="nvme", nvme_path=missing)).startswith(f"{key}.nvme_path: {missing!r}")
    assert refusal(offload(section, device="ssd")).startswith(f"{key}.device: ")
    assert refusal(offload(section, device=["cpu"])).startswith(f"{key}.device: ")
    assert refusal(offload(section, devise="cpu")) == f"{key}.devise: no such key; did you mean `device`?"
    assert refusal({"lohan": {}, "zero_optimization": {section: "cpu"}}).startswith(f"{key}: must be a section")


def test_max_in_cpu(tmp_path):
    message = refusal(offload("offload_param", device="nvme", nvme_path=str(tmp_path), max_in_cpu=1e8))
    assert message.startswith("zero_optimization.offload_param.max_in_cpu: ") and "lohan.host_memory" in message


@pytest.mark.parametrize("aio, key", [({"thread_count": 0}, "aio.thread_count"), ({"que": 1}, "aio.que"),
                                      ({"intra_op_parallelism": 1.5}, "aio.intra_op_parallelism"),
                                      ({"thread_count": float("nan")}, "aio.thread_count"),
                                      ({"thread_count": 1, "intra_op_parallelism": 2}, "aio.thread_count")])
def test_aio_refusals(aio, key):
    assert refusal({"lohan": {}, "aio": aio}).startswith(key)


# ---- what DeepSpeed sees, and what it does not

def full_config(tmp_path):
    return {**copy.deepcopy(HF_JSON), "optimizer": {**ADAMW, "type": "LoHanAdam"}, "aio": {"thread_count": 2},
            "lohan": {"host_memory": "1.5GB", "chunk_bytes": "auto", "update": None, "prefetch_depth": 0},
            "zero_optimization": {"reduce_bucket_size": "auto", "memory_efficient_linear": True,
                                  "gather_16bit_weights_on_model_save": False, "offload_param": {"device": "none"},
                                  "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}


def test_effective_ds_config(tmp_path):
    config = full_config(tmp_path)
    before = copy.deepcopy(config)
    effective = effective_ds_config(config)
    assert config == before
    assert effective == {
        **HF_JSON, "optimizer": ADAMW,
        "lohan": {"enabled": True, "host_memory": 1_500_000_000, "prefetch_depth": 0, "optimizer_tier": "ssd",
                  "ssd_paths": [str(tmp_path)], "ssd_threads": 2},
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False,
                              "stage3_gather_16bit_weights_on_model_save": True}}
    assert json.loads(json.dumps(effective)) == effective
    assert parse(effective) == parse(config)
    assert effective_ds_config(effective) == effective


def test_ignored_keys(tmp_path):
    config = full_config(tmp_path)
    config["zero_optimization"].update(sub_group_size=1e9, prefetch_bucket_size=1, stage3_max_live_parameters=1)
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    config["aio"]["queue_depth"] = 8
    config["activation_checkpointing"] = {"partition_activations": True}
    parse(config)
    assert ignored_keys(config) == [
        "zero_optimization.memory_efficient_linear", "zero_optimization.sub_group_size",
        "zero_optimization.stage3_max_live_parameters", "zero_optimization.prefetch_bucket_size",
        "activation_checkpointing.partition_activations", "zero_optimization.offload_optimizer.pin_memory",
        "aio.queue_depth"]


def test_keys_are_those_of_deepspeed():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    offload_config = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    fields = zero.DeepSpeedZeroConfig.model_fields
    names = set(fields) | {field.alias for field in fields.values()}
    assert set(config_checks.IGNORED_ZERO_KEYS) <= names
    for name, model in (("offload_optimizer", offload_config.DeepSpeedZeroOffloadOptimizerConfig),
                        ("offload_param", offload_config.DeepSpeedZeroOffloadParamConfig)):
        assert set(model.model_fields) == set(config_checks.OFFLOAD_KEYS[name])
    ruled = {rule.key.split(".")[1] for rule in config_checks.RULES if rule.key.startswith("zero_optimization.")}
    decided = {"stage", "override_module_apply", "compute_grad_norm", "gather_16bit_weights_on_model_save",
               "stage3_gather_fp16_weights_on_model_save", "offload_param", "offload_optimizer"}
    ignored = set(config_checks.IGNORED_ZERO_KEYS) | {k.removeprefix("stage3_") for k in
                                                      config_checks.IGNORED_ZERO_KEYS}
    assert set(fields) <= ruled | decided | ignored, "DeepSpeed has a key that nobody decided about"


def test_deepspeed_takes_the_effective_section(tmp_path):
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    config = effective_ds_config(full_config(tmp_path))
    model = zero.DeepSpeedZeroConfig(**config["zero_optimization"])
    assert model.stage == 3 and model.gather_16bit_weights_on_model_save and not model.memory_efficient_linear


def test_table_has_every_key():
    lines = config_table().splitlines()
    assert len(lines) == 2 + len(LohanConfig.model_fields)
    for name, line in zip(LohanConfig.model_fields, lines[2:]):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == f"`{name}`" and len(cells) == 4 and all(cells)


def test_import_is_light():
    code = ("import sys, lohan_ds.config_checks, lohan_ds.config; "
            "print([m for m in ('torch', 'deepspeed', 'transformers') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
