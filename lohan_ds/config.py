"""The "lohan" section of a DeepSpeed JSON: what the user may say, read once and never changed.

`parse` is the one way in: it reads the section, understands ZeRO-Infinity's keys as lohan's, and refuses what a
lohan run cannot honour (config_checks.py), while the JSON is read and not hours later. `effective_ds_config` is
the dict that DeepSpeed itself may see. Decisions (the plan) are made elsewhere; None here means "decide for me".
"""
from __future__ import annotations

import copy
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any, Literal

import pydantic
from pydantic import Field

from lohan_ds.config_checks import (IGNORED_ZERO_KEYS, check_ds_config, ignored_keys, is_automatic, is_off,
                                    refuse_unknown, translate)
from lohan_ds.errors import ConfigError
from lohan_ds.run_name import is_run_name

__all__ = ["LohanConfig", "parse", "effective_ds_config", "ignored_keys", "check_ssd_paths", "parse_bytes",
           "format_bytes", "config_table"]

MIB = 2**20
MIN_CHUNK_BYTES = 24 * 1024      # one page of 2048 elements, 12 bytes of state each (block.py)
MIN_BUDGET_BYTES = 4096          # below one page a number was surely meant in other units
MIN_SSD_FREE_BYTES = 16 * MIB    # per path
DECIDED_BY_PLAN = ("param_tier", "optimizer_tier", "update", "prefetch_depth", "chunk_bytes", "activations",
                   "activation_space")   # keys that a plan file takes the place of
AUTOMATIC = {"prefetch_depth": 2, "chunk_bytes": 16 * MIB, "ssd_threads": 4}   # the threads for each path

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def _setting(what: str, automatic: str) -> Any:
    """A field that is None unless given; the two texts are for the table of keys."""
    return Field(None, json_schema_extra={"what": what, "automatic": automatic})


class LohanConfig(pydantic.BaseModel):
    """The lohan section. Left out, null and "auto" mean the same for every key: automatic."""
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = Field(True, json_schema_extra={"what": "true or false", "automatic": "true"})
    """Whether lohan runs this job. False: DeepSpeed runs as if the section were not there, nothing is checked."""

    ssd_paths: list[str] = Field([], json_schema_extra={"what": "path or list of paths", "automatic": "none"})
    """Directories to keep data in, best one per SSD; data is striped over them, in proportion to their speed where
    `lohan profile` has measured it. None by default: only the host's memory is used, because no directory can be
    guessed that is sure to be on a fast disk."""

    ssd_space: int | None = _setting("size", "free space minus a reserve")
    """Bytes that may be used on all `ssd_paths` together. By default a reserve is left free for other programs."""

    host_memory: int | None = _setting("size", "free host memory minus a reserve")
    """Bytes of host memory that may be used, pinned memory included. By default what is free when the
    run starts less a reserve, because dataloaders need some too."""

    device_memory: int | None = _setting("size", "free GPU memory minus a reserve")
    """Bytes of memory that may be used on each GPU, activations included. By default what is free at the start."""

    param_tier: Literal["host", "ssd"] | None = _setting('"host" or "ssd"', "host if all fits, else ssd")
    """Where parameters live between uses. By default the fastest tier with room, because both give the same
    results."""

    optimizer_tier: Literal["host", "ssd"] | None = _setting('"host" or "ssd"', "host if all fits, else ssd")
    """Where fp32 master weights and Adam's moments live. By default the fastest tier with room."""

    sequence_length: int | None = Field(None, ge=1, json_schema_extra={"what": "tokens", "automatic": "unknown"})
    """Tokens per sequence, the longest that you train with. Lets the automatic plan count what a model of transformers
    saves for backward, and decide about it layer by layer. Unknown by default: all of it is then kept on the device."""

    plan: str | None = _setting("path of a file", "none")
    """A plan to carry out as it stands, block by block and activation by activation: what `lohan plan --save-plan`
    wrote, edited or not. It takes the place of `param_tier`, `optimizer_tier`, `update`, `prefetch_depth`,
    `chunk_bytes`, `activations` and `activation_space`. None by default: a plan is made when the run starts."""

    update: Literal["eager", "deferred", "serial"] | None = _setting(
        '"eager", "deferred" or "serial"', "eager or deferred, step by step, if shadow slots fit, else deferred")
    """When Adam runs: "eager" already in backward, into a second copy of parameters and optimizer state (shadow
    slots) that is dropped when the step turns out to be clipped; "deferred" while the next forward goes on, each
    block before it is used; "serial" inside `step()`. The results are the same. By default eager while none of the
    last 20 steps was clipped, else deferred; always deferred where shadow slots do not fit beside the rest, or where
    the CPU computes and all lies in memory."""

    run_name: str | None = _setting("letters, digits, . _ -", "none")
    """Makes the run survive its process: it stays on `ssd_paths` under this name, every step is committed, and the same
    script started again goes on where it ended, also after a power failure. None by default: the data on the SSDs is
    scratch, because only you know which starts belong together."""

    durability: Literal["shadow", "in_place"] | None = _setting('"shadow" or "in_place"', "shadow if it fits")
    """How a run with a name survives. "shadow": at its last committed step, whenever it ends; takes twice the space on
    the SSDs and one sync per step. "in_place": where it ended, if in good order; after a crash only its last checkpoint
    is left. By default shadow where the SSDs have room for it."""

    activations: Literal["keep", "recompute", "host", "ssd"] | None = _setting(
        '"keep", "recompute", "host" or "ssd"', "keep")
    """What becomes of what a layer saves for backward: "keep" leaves it on the device; "recompute" keeps the layer's
    input and computes the rest again; "host" and "ssd" swap it out and back, as far as `activation_space` reaches (on a
    CPU "host" is keep). The results are the same. What the model's own gradient checkpointing takes is left to it."""

    activation_space: int | None = _setting("size", "none")
    """Bytes on the host or on all `ssd_paths` together for `activations` "host" or "ssd". What does not fit is kept."""

    loss_tile_tokens: int | None = Field(None, ge=0, json_schema_extra={
        "what": "tokens, or 0 for never", "automatic": "512 where logits take more than 1/16 of the device memory"})
    """Tokens at a time for which a Hugging Face language model that is given labels computes its head and loss, so that
    the logits of a batch never exist as a whole. Costs a third of the head's compute and rounds differently, so runs
    with the same bits need the same number. `outputs.logits` are computed when looked at. By default only for batches
    whose logits, fp32 logits and their gradient together are large for `device_memory`, or all the memory it has."""

    prefetch_depth: int | None = Field(None, ge=0, json_schema_extra={"what": "units", "automatic": "2"})
    """Units (layers) fetched ahead of the one that computes. By default 2: one in transfer, one ready. More needs
    more device memory; 0 fetches each when it is needed."""

    chunk_bytes: int | None = _setting("size, at least 24KiB", "16MiB")
    """Bytes of optimizer state that are read, updated and written at a time. By default 16 MiB: large enough for
    full SSD speed, small enough for a few to fit in host memory."""

    ssd_threads: int | None = Field(None, ge=1, json_schema_extra={"what": "threads", "automatic": "4 for each path"})
    """Threads that read and write the SSDs. By default 4 for each of `ssd_paths`: enough requests in flight to keep an
    NVMe SSD busy."""

    update_threads: int | None = Field(None, ge=1, json_schema_extra={
        "what": "threads", "automatic": "all cores but one beside a GPU, else torch's number"})
    """CPU threads of Adam, and of adding up gradients that have come off a GPU. By default all physical cores but one
    beside a GPU, whatever OMP_NUM_THREADS says; where the CPU computes the model too, as many as torch has there."""

    step_report: bool = Field(False, json_schema_extra={"what": "true or false", "automatic": "false"})
    """Whether to print a line per step: its seconds, how much of the update lay under forward and backward, what
    waited for what, SSD bytes and rates. Printed once the step's update is over, so often one step later."""

    trace_path: str | None = _setting("path of a file", "none")
    """Where to write a trace of what every resource did when, for chrome://tracing or ui.perfetto.dev: every 100 steps
    and at the end, the last 200,000 spans. The directory must exist. None by default: recording takes a little time."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_automatic(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if not is_automatic(v)} if isinstance(data, dict) else data

    @pydantic.field_validator("ssd_paths", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        if isinstance(paths, (list, tuple)) and "" in paths:
            raise ConfigError(f"lohan.ssd_paths[{paths.index('')}]: empty; name a directory on the SSD")
        return paths

    @pydantic.field_validator("ssd_space", "host_memory", "device_memory", "chunk_bytes", "activation_space",
                              mode="before")
    @classmethod
    def _size(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        key = f"lohan.{info.field_name}"
        nbytes = parse_bytes(value, key)
        smallest = MIN_CHUNK_BYTES if info.field_name == "chunk_bytes" else MIN_BUDGET_BYTES
        if nbytes < smallest:
            raise ConfigError(f"{key}: must be at least {smallest} bytes, got {value!r}; sizes are in bytes unless "
                              'they have a unit, like "24GB"')
        return nbytes

    @pydantic.field_validator("prefetch_depth", "ssd_threads", "update_threads", "loss_tile_tokens", "sequence_length",
                              mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("must be a whole number")
        return value

    @pydantic.model_validator(mode="after")
    def _needs_paths(self) -> LohanConfig:
        wanting = [f"lohan.{name} is {getattr(self, name)!r}" for name in ("optimizer_tier", "param_tier")
                   if getattr(self, name) == "ssd"]
        wanting += [f"lohan.ssd_space is {self.ssd_space}"] if self.ssd_space is not None else []
        wanting += ["lohan.activations is 'ssd'"] if self.activations == "ssd" else []
        wanting += [f"lohan.run_name is {self.run_name!r}"] if self.run_name is not None else []
        if wanting and not self.ssd_paths:
            raise ConfigError(f"lohan.ssd_paths: missing, and {wanting[0]}; name a directory on the SSD")
        return self

    @pydantic.model_validator(mode="after")
    def _has_one_plan(self) -> LohanConfig:
        decided = [name for name in DECIDED_BY_PLAN if getattr(self, name) is not None]
        if self.plan is not None and decided:
            raise ConfigError(f"lohan.{decided[0]}: lohan.plan is {self.plan!r}, and that file decides it; edit the "
                              "file, or remove one of the two")
        return self

    @pydantic.model_validator(mode="after")
    def _has_activation_space(self) -> LohanConfig:
        swaps = self.activations in ("host", "ssd")
        if swaps != (self.activation_space is not None):
            raise ConfigError(f"lohan.activation_space: {'missing' if swaps else 'without effect'}, since "
                              f"lohan.activations is {self.activations!r}; "
                              + ("name a size" if swaps else "remove it, or swap to host or ssd"))
        return self

    @pydantic.model_validator(mode="after")
    def _can_survive(self) -> LohanConfig:
        if self.run_name is None:
            if self.durability is not None:
                raise ConfigError(f"lohan.durability: {self.durability!r} needs lohan.run_name, by which the next "
                                  "start finds the run")
            return self
        if not is_run_name(self.run_name):
            raise ConfigError(f"lohan.run_name: got {self.run_name!r}; use 1 to 64 letters, digits, '.', '_' or '-', "
                              "with a letter or digit at both ends")
        for name in ("optimizer_tier", "param_tier"):
            if getattr(self, name) == "host":
                raise ConfigError(f'lohan.{name}: "host" does not survive a crash, and lohan.run_name is '
                                  f"{self.run_name!r}; remove one of the two")
        if self.durability == "in_place" and self.update == "eager":
            raise ConfigError('lohan.update: "eager" needs shadow slots, which lohan.durability "in_place" does '
                              "without; remove one of the two")
        return self

    def with_defaults(self) -> LohanConfig:
        """The same with the keys of `AUTOMATIC` filled in; budgets, tiers and `update` stay None: the plan decides."""
        automatic = {**AUTOMATIC, "ssd_threads": AUTOMATIC["ssd_threads"] * max(len(self.ssd_paths), 1)}
        return self.model_copy(update={k: v for k, v in automatic.items() if getattr(self, k) is None})


def parse(ds_config: dict) -> LohanConfig | None:
    """Reads and checks a whole DeepSpeed config; None when lohan is not asked for. Touches the disk: it tries the
    SSD paths. Raises ConfigError with the JSON key, what was got and what to do. Does not change `ds_config`."""
    config, path_keys = _read(ds_config)
    if config is not None:
        _check_ssd_paths(config, path_keys)
        _check_trace_path(config.trace_path)
    return config


def _read(ds_config: dict) -> tuple[LohanConfig | None, list[str]]:
    """`parse` without touching the disk, and the JSON key of each SSD path."""
    section = ds_config.get("lohan")
    if section is None or section is False:
        return None, []
    section = {} if section is True else section
    if not isinstance(section, dict):
        raise ConfigError(f"lohan: must be a section {{...}} or true or false, got {section!r}")
    if not is_automatic(section.get("enabled")) and is_off(section["enabled"]):
        return None, []
    refuse_unknown("lohan", section, LohanConfig.model_fields)
    check_ds_config(ds_config)
    added, path_keys = translate(ds_config, section)
    try:
        return LohanConfig(**{**section, **added}), path_keys
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_readable(e) for e in error.errors())) from None


def _readable(error: Any) -> str:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    key = "lohan" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def effective_ds_config(ds_config: dict) -> dict:
    """A deep copy for DeepSpeed's own eyes: stage 3, the lohan section in plain JSON without "auto", ZeRO-Infinity's
    keys folded into it. `parse` gives the same for both dicts. A plain deep copy when lohan is not asked for."""
    result = copy.deepcopy(ds_config)
    config, _ = _read(ds_config)
    if config is None:
        return result
    result["lohan"] = {"enabled": True, **config.model_dump(exclude_none=True, exclude_defaults=True)}
    zero = result.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    for name in ("offload_optimizer", "offload_param", "gather_16bit_weights_on_model_save",
                 "stage3_gather_fp16_weights_on_model_save"):  # the last two are other names of a key set below
        zero.pop(name, None)
    for name in IGNORED_ZERO_KEYS:   # Accelerate would fill "auto" from config.hidden_size, which not every model has
        if is_automatic(zero.get(name, 0)):
            zero.pop(name)
    zero.update(stage=3, memory_efficient_linear=False, stage3_gather_16bit_weights_on_model_save=True)
    result["zero_optimization"] = zero
    result.pop("aio", None)
    optimizer = result.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("type")).lower() == "lohanadam":
        optimizer["type"] = "AdamW"
    return result


def check_ssd_paths(config: LohanConfig) -> None:
    """Raises ConfigError unless each SSD path is a directory, named once, that takes files and has free space."""
    _check_ssd_paths(config, [f"lohan.ssd_paths[{i}]" for i in range(len(config.ssd_paths))])


def _check_ssd_paths(config: LohanConfig, keys: list[str]) -> None:
    seen: dict[tuple[int, int], str] = {}
    free_bytes_of_device: dict[int, int] = {}
    for key, path in zip(keys, config.ssd_paths):
        if not os.path.exists(path):
            raise ConfigError(f"{key}: {path!r} does not exist; create the directory or name another one")
        if not os.path.isdir(path):
            raise ConfigError(f"{key}: {path!r} is not a directory; name the directory to keep data in")
        stat = os.stat(path)
        if (stat.st_dev, stat.st_ino) in seen:
            raise ConfigError(f"{key}: {path!r} is the same directory as {seen[stat.st_dev, stat.st_ino]}; keep one")
        seen[stat.st_dev, stat.st_ino] = key
        try:
            with tempfile.NamedTemporaryFile(dir=path, prefix=".lohan_check_"):
                pass
        except OSError as error:
            raise ConfigError(f"{key}: cannot create files in {path!r} ({error.strerror or error}); it belongs to "
                              f"{_owner(path)}; change its permissions or name another directory") from None
        free_bytes = shutil.disk_usage(path).free
        if free_bytes < MIN_SSD_FREE_BYTES:
            raise ConfigError(f"{key}: {path!r} has {format_bytes(free_bytes)} free, at least "
                              f"{format_bytes(MIN_SSD_FREE_BYTES)} are needed; free some or name another directory")
        free_bytes_of_device[stat.st_dev] = free_bytes
    total_free_bytes = sum(free_bytes_of_device.values())
    if config.ssd_space is not None and config.ssd_space > total_free_bytes:
        raise ConfigError(f"lohan.ssd_space: {format_bytes(config.ssd_space)} needed, {format_bytes(total_free_bytes)}"
                          f" free on {', '.join(config.ssd_paths)}; lower it or free some space")


def _check_trace_path(path: str | None) -> None:
    if path is None:
        return
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"lohan.trace_path: the directory {directory!r} does not exist; create it or name another")
    if not os.path.basename(path) or os.path.isdir(path):
        raise ConfigError(f"lohan.trace_path: {path!r} is a directory; name a file in it, like 'trace.json'")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"lohan.trace_path: cannot create files in {directory!r}; it belongs to {_owner(directory)}; "
                          "change its permissions or name another directory")


def _owner(path: str) -> str:
    try:
        return f"user {pathlib.Path(path).owner()!r}"
    except (KeyError, NotImplementedError):
        return f"user id {os.stat(path).st_uid}"


def parse_bytes(value: Any, key: str) -> int:
    """Bytes from an int, a float, or a string such as "24GB" (10^9) or "24GiB" (2^30); ConfigError names `key`."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].lower() in _UNITS:
        number = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    else:
        raise ConfigError(f'{key}: must be a number of bytes or a size like "24GB" or "24GiB", got {value!r}')
    if not 1 <= number < 2**63:  # false for NaN too
        raise ConfigError(f"{key}: must be at least 1 byte and less than 2^63, got {value!r}")
    return round(number)


def format_bytes(nbytes: float) -> str:
    """ "13.8 GB": units of 1000, as disks and error messages have them."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def config_table() -> str:
    """A markdown table of all keys for the README, made from the fields of `LohanConfig`."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in LohanConfig.model_fields.items():
        extra = field.json_schema_extra
        meaning = " ".join((field.description or "").split())
        lines.append(f"| `{name}` | {extra['what']} | {extra['automatic']} | {meaning} |")
    return "\n".join(lines) + "\n"
