"""`Case` and `Side`: what is trained, and by whom. Plain values that go to the processes of the sides."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lohan_ds.errors import ConfigError


@dataclass(frozen=True)
class ModelSize:
    """A Llama-style model with random weights, its head not tied to the embedding; and the tokens it is trained on."""
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    vocab: int
    seq: int                  # tokens per sequence, unless said otherwise


SIZES = {
    "tiny": ModelSize(64, 96, 2, 4, 257, 16),   # 0.1M: shows nothing but that everything runs
    "134m": ModelSize(768, 2048, 12, 12, 32000, 256),
    "374m": ModelSize(1024, 2816, 24, 16, 32000, 256),
    "1.14b": ModelSize(2048, 5504, 20, 16, 32000, 128),
}
# Largest norm of the gradients. "every": less than any norm met in training, "never": more; a run checks both.
CLIP_LIMITS = {"every": 0.01, "never": 1e6, "none": 0.0}
KINDS = {"torch": ("adamw", "lohan-adam"), "fsdp2": (), "zero2-cpu": (), "zero3-cpu": (), "zero3-nvme": (),
         "zero-infinity": (), "lohan-host": ("eager", "deferred", "serial"),
         "lohan-ssd": ("eager", "deferred", "serial")}   # and their variants
USES_DISK = ("zero3-nvme", "zero-infinity", "lohan-ssd")
REFERENCE = "torch"


@dataclass(frozen=True)
class Case:
    """What all sides of a run have in common."""
    size: str                 # of SIZES
    seq: int
    batch: int
    dtype: str                # "fp32" or "bf16": of the parameters; masters and moments are fp32
    clip: str                 # of CLIP_LIMITS
    num_threads: int
    fp32_gemms: bool          # with bf16: activations and matrix products in fp32, only what is stored has 16 bits

    @property
    def clip_limit(self) -> float:
        return CLIP_LIMITS[self.clip]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq


@dataclass(frozen=True)
class Side:
    """One way to train."""
    name: str                 # as the user wrote it: "kind" or "kind:variant"
    kind: str                 # of KINDS
    variant: str = ""         # "" is the kind's own choice
    settings: dict[str, Any] = field(default_factory=dict)   # of DeepSpeed, see deepspeed_settings.py
    host_memory: str = ""     # lohan only: its "host_memory", "" is the default

    @property
    def is_lohan(self) -> bool:
        return self.kind.startswith("lohan-")

    def with_settings(self, settings: dict[str, Any]) -> Side:
        return replace(self, settings=settings)


def parse_sides(text: str, host_memory: str = "") -> list[Side]:
    """From "torch,lohan-ssd:eager,..."; plain torch comes first, named or not: all losses are compared with its.

    ConfigError for what there is not, and for a side that is named twice.
    """
    sides = []
    for name in [REFERENCE, *(word.strip() for word in text.split(",") if word.strip() != REFERENCE)]:
        kind, _, variant = name.partition(":")
        if kind not in KINDS:
            raise ConfigError(f"--sides: got {name!r}; there are {', '.join(KINDS)}")
        if variant and variant not in KINDS[kind]:
            known = ", ".join(f"{kind}:{known}" for known in KINDS[kind]) or f"no variants of {kind}"
            raise ConfigError(f"--sides: got {name!r}; there are {known}")
        if name in (side.name for side in sides):
            raise ConfigError(f"--sides: {name} is named twice")
        sides.append(Side(name, kind, variant, host_memory=host_memory if kind.startswith("lohan-") else ""))
    return sides


def has_native_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices by itself; else they are many times slower than fp32 ones."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"}.intersection(flags))
