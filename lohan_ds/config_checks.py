"""The rest of a DeepSpeed JSON, seen from a run that has a "lohan" section: refused, understood or ignored.

`RULES` is what is refused: DeepSpeed takes these keys without a word, and lohan would train something else than
they say. `translate` is what is understood: ZeRO-Infinity's own keys, turned into their lohan meaning.
`IGNORED_ZERO_KEYS` and its neighbours are what is without effect; the engine warns about those once.

Everywhere a value that is left out, null or Hugging Face's "auto" says nothing: it is neither refused nor used.
"""
from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lohan_ds.errors import ConfigError

SUPPORTED_OPTIMIZERS = ("Adam", "AdamW", "LoHanAdam")
OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode", "torch_adam",
                    "fp32_optimizer_states", "amsgrad", "maximize", "foreach", "fused", "capturable", "set_grad_none")
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")  # as in DeepSpeed's DtypeEnum

IGNORED_ZERO_KEYS = (
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "cpu_offload_use_pin_memory",
    "enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1", "load_from_fp32_weights",
    "log_trace_cache_warnings", "memory_efficient_linear", "overlap_comm", "parameter_alignment",
    "pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory", "sub_group_size", "use_multi_rank_bucket_allreduce",
    "stage3_allgather_sequential", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold", "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params")
"""Keys of `zero_optimization` that tune mechanics of ZeRO-1/2/3 which lohan does not use. The results of a run do
not depend on them, so they are not refused: nearly every DeepSpeed JSON has some."""

IGNORED_TOP_KEYS = ("communication_data_type", "disable_allgather", "zero_force_ds_cpu_optimizer",
                    "activation_checkpointing.partition_activations")
"""The same outside `zero_optimization`. `partition_activations` splits over model-parallel ranks: there are none."""

AUTOMATIC_OFFLOAD_KEYS = ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read",
                          "pipeline_write", "cpuadam_cores_perc")
"""Keys of `offload_optimizer` / `offload_param` that tune how ZeRO-Infinity moves bytes; lohan decides that itself."""

AUTOMATIC_AIO_KEYS = ("block_size", "queue_depth", "single_submit", "overlap_events")
"""Keys of `aio` that tune DeepSpeed's I/O library, which lohan does not use."""

OFFLOAD_TIER_KEYS = {"offload_optimizer": "optimizer_tier", "offload_param": "param_tier"}
OFFLOAD_KEYS = {"offload_optimizer": ("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read",
                                      "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
                "offload_param": ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")}
DEVICE_TIERS = {"none": None, "cpu": "host", "nvme": "ssd"}
MAX_IN_CPU_DEFAULT = 1e9  # elements; DeepSpeed's default
AIO_THREAD_KEYS = ("thread_count", "intra_op_parallelism")  # older and newer name of the same


def is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "0", "0.0", "no", "off", "none", "")


def is_on(value: Any) -> bool:
    return not is_off(value)


def is_given(value: Any) -> bool:
    return value is not False


def is_above_one(value: Any) -> bool:
    try:
        return float(value) > 1
    except (TypeError, ValueError):
        return False  # not a size at all: DeepSpeed's own message is better


def is_not_one(value: Any) -> bool:
    return value != 1


@dataclass(frozen=True)
class Rule:
    """`key` (dotted path in the JSON) is refused when `refused(value)`; never called with None or "auto"."""
    key: str
    refused: Callable[[Any], bool]
    advice: str


REMOVE = "remove this key"
FP32_STATE = "lohan keeps master weights, gradient sums and optimizer state in fp32; remove this key"
ONE_GPU_PER_MODEL = "lohan keeps whole layers on each GPU and uses data parallelism only; remove this key"
SAVE_IN_CALL = "lohan's memory may change while a checkpoint is written in the background; remove this key"

RULES = (
    Rule("hybrid_engine.enabled", is_on, "DeepSpeed's hybrid engine cannot run on lohan; remove this section"),
    Rule("pipeline.stages", is_above_one, "pipeline parallelism cannot run on lohan; remove this section"),
    Rule("tensor_parallel.autotp_size", is_above_one, ONE_GPU_PER_MODEL),
    Rule("tensor_parallel.tp.tp_size", is_above_one, ONE_GPU_PER_MODEL),
    Rule("tensor_parallel.tensor_parallel.tp_size", is_above_one, ONE_GPU_PER_MODEL),
    Rule("expert_parallel.enabled", is_on, ONE_GPU_PER_MODEL),
    Rule("sequence_parallel_size", is_above_one, ONE_GPU_PER_MODEL),
    Rule("compile.deepcompile", is_on, "DeepCompile rewrites ZeRO's own fetches, which lohan replaces; " + REMOVE),
    Rule("autotuning.enabled", is_on, "the autotuner tries other ZeRO stages, lohan plans by itself; " + REMOVE),
    Rule("zero_optimization.zenflow", is_given, "ZenFlow replaces the same step as lohan; choose one of the two"),
    Rule("zero_optimization.offload_optimizer.super_offload", is_on,
         "SuperOffload replaces the same step as lohan; choose one of the two"),
    Rule("zero_optimization.offload_optimizer.ratio", is_not_one,
         "lohan places each block by its plan; remove this key and set lohan.host_memory or lohan.device_memory"),
    Rule("zero_optimization.cpu_offload", is_on, 'write "lohan": {"optimizer_tier": "host"} instead'),
    Rule("zero_optimization.cpu_offload_param", is_on, 'write "lohan": {"param_tier": "host"} instead'),
    Rule("zero_optimization.zero_hpz_partition_size", is_above_one, "lohan has no ZeRO++; " + REMOVE),
    Rule("zero_optimization.zero_quantized_weights", is_on, "lohan has no ZeRO++; " + REMOVE),
    Rule("zero_optimization.zero_quantized_nontrainable_weights", is_on, "lohan has no ZeRO++; " + REMOVE),
    Rule("zero_optimization.zero_quantized_gradients", is_on, "lohan has no ZeRO++; " + REMOVE),
    Rule("zero_optimization.zeropp_loco_param", is_given, "lohan has no ZeRO++; " + REMOVE),
    Rule("zero_optimization.mics_shard_size", lambda value: value not in (-1, 0), "lohan has no MiCS; " + REMOVE),
    Rule("zero_optimization.mics_hierarchical_params_gather", is_on, "lohan has no MiCS; " + REMOVE),
    Rule("zero_optimization.elastic_checkpoint", is_on, "ZeRO-3 checkpoints are not elastic; " + REMOVE),
    Rule("elasticity.enabled", is_on, "elastic training would change the batch during the run; " + REMOVE),
    Rule("checkpoint.load_universal", is_on, "universal checkpoints are not read yet; " + REMOVE),
    Rule("load_universal_checkpoint", is_on, "universal checkpoints are not read yet; " + REMOVE),
    Rule("checkpoint.writer.decoupled", is_on, SAVE_IN_CALL),
    Rule("datastates_ckpt", is_given, SAVE_IN_CALL),
    Rule("amp.enabled", is_on, 'lohan does not run under Apex AMP; use "bf16": {"enabled": true}'),
    Rule("torch_autocast.enabled", is_on, 'lohan does not run under autocast; use "bf16": {"enabled": true}'),
    Rule("bf16.bf16_master_weights_and_grads", is_on, FP32_STATE),
    Rule("bf16.bf16_optimizer_states", is_on, FP32_STATE),
    Rule("bfloat16.bf16_master_weights_and_grads", is_on, FP32_STATE),
    Rule("bfloat16.bf16_optimizer_states", is_on, FP32_STATE),
    Rule("fp16.fp16_master_weights_and_grads", is_on, FP32_STATE),
    Rule("optimizer.params.fp32_optimizer_states", is_off, FP32_STATE),
    Rule("data_types.grad_accum_dtype", lambda value: str(value).lower() not in FP32_NAMES,
         'lohan accumulates gradients in fp32; write "fp32" or remove this key'),
    Rule("managed_gradient_accumulation", is_off, "lohan must know which micro-step is the last; " + REMOVE),
    Rule("prescale_gradients", is_on, "lohan averages gradients after the sum; " + REMOVE),
    Rule("gradient_predivide_factor", is_not_one, "lohan averages gradients after the sum; " + REMOVE),
    Rule("gradient_allreduce_op", lambda value: str(value).lower() != "mean",
         'lohan averages gradients over GPUs; write "mean" or remove this key'),
    Rule("optimizer.params.max_grad_norm", lambda value: True, "use the top-level key gradient_clipping instead"),
    Rule("optimizer.params.amsgrad", is_on, "lohan's Adam keeps no maximum of exp_avg_sq; " + REMOVE),
    Rule("optimizer.params.maximize", is_on, "lohan's Adam only minimizes; negate the loss and remove this key"),
    Rule("optimizer.params.bias_correction", is_off, "lohan's Adam always corrects the bias; " + REMOVE),
    Rule("activation_checkpointing.cpu_checkpointing", is_on,
         "lohan does not move activations to the host yet; remove this key (recomputing on the GPU works)"),
    Rule("data_efficiency.data_routing.random_ltd.enabled", is_on, "layers that drop tokens are not supported; " +
         REMOVE),
    Rule("progressive_layer_drop.enabled", is_on, "lohan needs the same layers in every step; " + REMOVE),
    Rule("sparse_attention", is_given, "DeepSpeed's sparse attention is not supported; " + REMOVE),
    Rule("sparse_gradients", is_on, "lohan reduces dense gradients only; " + REMOVE),
    Rule("compression_training", is_on, "training under compression is not supported; " + REMOVE),
    Rule("quantize_training.enabled", is_on, "training under quantization is not supported; " + REMOVE),
    Rule("weight_quantization", is_on, "quantized weights are not supported; " + REMOVE),
    Rule("aio.use_gds", is_on, "lohan moves SSD data through host memory; " + REMOVE),
)


def check_ds_config(ds_config: dict) -> None:
    """Raises ConfigError for the first key that a lohan run cannot honour."""
    _check_stage(ds_config)
    _check_precision(ds_config)
    for rule in RULES:
        value = lookup(ds_config, rule.key)
        if value is not None and rule.refused(value):
            raise ConfigError(f"{rule.key}: {value!r} is refused beside a lohan section: {rule.advice}")
    _check_optimizer(ds_config)


def lookup(ds_config: dict, key: str) -> Any:
    """The value at a dotted path; None when it is left out, null or "auto"."""
    value: Any = ds_config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if is_automatic(value) else value


def is_automatic(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def refuse_unknown(prefix: str, got: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first name in `got` that is not in `known`, with the nearest right one."""
    known = tuple(known)
    for name in got:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known keys are {', '.join(known)}"
        raise ConfigError(f"{prefix}.{name}: no such key; {hint}")


def _section(ds_config: dict, key: str) -> dict:
    """The section at a dotted path, {} when it says nothing."""
    value = lookup(ds_config, key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: must be a section {{...}}, got {value!r}")
    return value


def _check_stage(ds_config: dict) -> None:
    zero = ds_config.get("zero_optimization")
    if isinstance(zero, bool):
        raise ConfigError(f'zero_optimization: {zero} means another stage than 3 to DeepSpeed; write "stage": 3 '
                          "inside a section, or leave the key out")
    stage = _section(ds_config, "zero_optimization").get("stage")
    if not is_automatic(stage) and (isinstance(stage, bool) or stage != 3):
        raise ConfigError(f"zero_optimization.stage: lohan needs stage 3, got {stage!r}; set it to 3 or leave it out")


def _check_precision(ds_config: dict) -> None:
    for bf16 in ("bf16.enabled", "bfloat16.enabled"):
        values = lookup(ds_config, "fp16.enabled"), lookup(ds_config, bf16)
        if all(value is not None and is_on(value) for value in values):
            raise ConfigError(f"fp16.enabled and {bf16} are both true; set one of them to false")


def _check_optimizer(ds_config: dict) -> None:
    name = lookup(ds_config, "optimizer.type")
    if name is None:
        return
    kind = str(name).lower()
    if kind not in [supported.lower() for supported in SUPPORTED_OPTIMIZERS]:
        raise ConfigError(f"optimizer.type: lohan cannot run {name!r}; use one of {', '.join(SUPPORTED_OPTIMIZERS)}")
    refuse_unknown("optimizer.params", _section(ds_config, "optimizer.params"), OPTIMIZER_PARAMS)
    adam_w_mode = lookup(ds_config, "optimizer.params.adam_w_mode")
    if kind != "adam" and adam_w_mode is not None and is_off(adam_w_mode):
        raise ConfigError(f'optimizer.params.adam_w_mode: {adam_w_mode!r} contradicts optimizer.type {name!r}; '
                          'use "type": "Adam"')


def translate(ds_config: dict, section: dict) -> tuple[dict[str, Any], list[str]]:
    """What ZeRO-Infinity's keys say, as lohan keys to add to `section` (the lohan section as the user wrote it).

    Returns those keys, and for each path in `ssd_paths` the JSON key that it came from. Raises ConfigError where
    the two contradict. Two different nvme_path values become two SSDs that lohan stripes everything over.
    """
    added: dict[str, Any] = {}
    nvme_paths: dict[str, tuple[str, str]] = {}  # real path -> (path as written, its key)
    own_paths = _own_paths(section)
    for name, tier_key in OFFLOAD_TIER_KEYS.items():
        key = f"zero_optimization.{name}"
        offload = _section(ds_config, key)
        tier = _offload_tier(key, offload, OFFLOAD_KEYS[name])
        if tier is None:
            continue
        own = section.get(tier_key)
        if not is_automatic(own) and own != tier:
            raise ConfigError(f"lohan.{tier_key} is {own!r} but {key}.device is {offload['device']!r} (that is "
                              f"{tier!r}); make them agree or remove {key}")
        added[tier_key] = tier
        path = "" if is_automatic(offload.get("nvme_path")) else str(offload["nvme_path"])
        if tier == "ssd" and path not in ("", "none"):  # Accelerate writes "none" for no path
            nvme_paths.setdefault(os.path.realpath(path), (path, f"{key}.nvme_path"))
        elif tier == "ssd" and not own_paths:
            raise ConfigError(f'{key}.nvme_path: missing, and {key}.device is "nvme"; name a directory on the SSD '
                              "here or in lohan.ssd_paths")
    keys = [f"lohan.ssd_paths[{i}]" for i in range(len(own_paths))]
    if nvme_paths and not own_paths:
        added["ssd_paths"] = [path for path, _ in nvme_paths.values()]
        keys = [key for _, key in nvme_paths.values()]
    elif nvme_paths and set(nvme_paths) != {os.path.realpath(path) for path in own_paths}:
        names = " and ".join(f"{key} is {path!r}" for path, key in nvme_paths.values())
        raise ConfigError(f"lohan.ssd_paths is {own_paths} but {names}; make them agree or remove nvme_path")
    threads = _aio_threads(ds_config)
    if threads is not None and is_automatic(section.get("ssd_threads")):
        added["ssd_threads"] = threads
    return added, keys


def _own_paths(section: dict) -> list[str]:
    """lohan.ssd_paths as a list; [] when left out or malformed (LohanConfig says what is wrong with it)."""
    paths = section.get("ssd_paths")
    if is_automatic(paths):
        return []
    paths = [paths] if isinstance(paths, str) else paths
    return list(paths) if isinstance(paths, (list, tuple)) and all(isinstance(p, str) for p in paths) else []


def _offload_tier(key: str, offload: dict, known: tuple[str, ...]) -> str | None:
    refuse_unknown(key, offload, known)
    device = offload.get("device")
    device = "none" if is_automatic(device) else device
    if not isinstance(device, str) or device not in DEVICE_TIERS:
        raise ConfigError(f"{key}.device: must be one of {', '.join(DEVICE_TIERS)}, got {device!r}")
    max_in_cpu = offload.get("max_in_cpu")  # DeepSpeed reads it for nvme only
    if device == "nvme" and not is_automatic(max_in_cpu) and max_in_cpu != MAX_IN_CPU_DEFAULT:
        raise ConfigError(f"{key}.max_in_cpu: got {max_in_cpu!r} elements, lohan is given bytes for everything it "
                          "keeps on the host; remove this key and set lohan.host_memory")
    return DEVICE_TIERS[device]


def _aio_threads(ds_config: dict) -> int | None:
    aio = _section(ds_config, "aio")
    refuse_unknown("aio", aio, AUTOMATIC_AIO_KEYS + AIO_THREAD_KEYS + ("use_gds",))
    given = {key: aio[key] for key in AIO_THREAD_KEYS if not is_automatic(aio.get(key))}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value >= 1 and value % 1 == 0):
            raise ConfigError(f"aio.{key}: must be a whole number of I/O threads, at least 1, got {value!r}")
    if len(set(given.values())) > 1:
        raise ConfigError(f"aio.thread_count and aio.intra_op_parallelism differ ({given}); keep one of them")
    return int(next(iter(given.values()))) if given else None


def ignored_keys(ds_config: dict) -> list[str]:
    """The keys in `ds_config` that have no effect under lohan, for one warning. Give the dict as the user wrote it."""
    keys = [f"zero_optimization.{name}" for name in IGNORED_ZERO_KEYS]
    keys += [f"zero_optimization.{name.removeprefix('stage3_')}" for name in IGNORED_ZERO_KEYS if
             name.startswith("stage3_")]  # DeepSpeed takes these by both names
    keys += IGNORED_TOP_KEYS
    keys += [f"zero_optimization.{name}.{key}" for name in OFFLOAD_TIER_KEYS for key in AUTOMATIC_OFFLOAD_KEYS]
    keys += [f"aio.{name}" for name in AUTOMATIC_AIO_KEYS]
    return [key for key in keys if lookup(ds_config, key) is not None]
