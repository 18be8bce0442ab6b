"""The profile of a GPT from closed formulas: for papers' models that have a shape but no config file.

Legend: s sequence length, b micro-batch, h hidden size, L layers, V vocabulary; 16-bit activations, flash attention
(no score matrices), causal. One block saves 34 s*b*h bytes and costs 24 s*b*h^2 + 2 s^2*b*h FLOPs forward.

Worked numbers: 13B (L 40, h 5120), s 1024, b 32: 212.5 GiB of activations, of which 12.5 GiB are block inputs.
"""
from __future__ import annotations

from dataclasses import dataclass

from lohan_ds.block import chunk_numel_for, make_block
from lohan_ds.profile import ActivationItem, ModelProfile, ModelSize, UnitProfile

CHUNK_BYTES = 16 * 2**20   # of optimizer state


@dataclass(frozen=True)
class GptShape:
    """What fixes a GPT's size."""
    num_layers: int
    num_heads: int            # flash attention: no item depends on it
    hidden_size: int
    vocabulary_size: int
    max_positions: int


def gpt_profile(shape: GptShape, micro_batch: int, sequence_length: int, with_head: bool = True) -> ModelProfile:
    """Embedding, blocks and head; without a head the model ends in its last hidden state (a final norm)."""
    h, chunk_numel = shape.hidden_size, chunk_numel_for(CHUNK_BYTES)
    parameters = [("embedding", [("token", (shape.vocabulary_size, h), 0), ("position", (shape.max_positions, h), 0)])]
    parameters += [(f"layer.{i}", _block_parameters(h)) for i in range(shape.num_layers)]
    parameters += [("head", [("norm.weight", (h,), 0), ("norm.bias", (h,), 0)])]
    if with_head:
        parameters[-1][1].append(("lm_head", (shape.vocabulary_size, h), 0))
    blocks = tuple(make_block(i, name, "bfloat16", shapes, chunk_numel) for i, (name, shapes) in enumerate(parameters))
    size = ModelSize(blocks, tuple((i,) for i in range(len(blocks))),
                     max(slot.numel for block in blocks for slot in block.slots))
    tokens = micro_batch * sequence_length
    hidden_bytes = 2 * tokens * h
    items = _block_items(shape, micro_batch, sequence_length)
    layer_flops = sum(item.recompute_flops for item in items)
    logits_bytes = 2 * tokens * shape.vocabulary_size if with_head else 0
    units = [UnitProfile("embedding", "embedding", (0,), 0.0, (), hidden_bytes, 0)]
    units += [UnitProfile(f"layer.{i}", "layer", (i + 1,), layer_flops, items, hidden_bytes, 0)
              for i in range(shape.num_layers)]
    units += [UnitProfile("head", "head", (shape.num_layers + 1,),
                          2.0 * tokens * h * shape.vocabulary_size if with_head else 0.0,
                          (ActivationItem("input", hidden_bytes, 0.0, is_input=True),),
                          logits_bytes or hidden_bytes, logits_bytes)]   # workspace: the logits' gradient
    return ModelProfile(size, tuple(units), micro_batch, sequence_length)


def _block_parameters(h: int) -> list[tuple[str, tuple[int, ...], int | None]]:
    """12 h^2 + 13 h elements."""
    weights = {"qkv": (3 * h, h), "proj": (h, h), "fc1": (4 * h, h), "fc2": (h, 4 * h)}
    shapes = [(f"{name}.weight", size, 0) for name, size in weights.items()]
    shapes += [(f"{name}.bias", size[:1], 0) for name, size in weights.items()]
    return shapes + [(f"norm{n}.{kind}", (h,), 0) for n in (1, 2) for kind in ("weight", "bias")]


def _block_items(shape: GptShape, micro_batch: int, sequence_length: int) -> tuple[ActivationItem, ...]:
    """What one block saves: 34 s*b*h bytes. Norms and GELU cost no FLOPs worth counting."""
    s, h, tokens = sequence_length, shape.hidden_size, micro_batch * sequence_length
    hidden_bytes = 2 * tokens * h
    return (
        ActivationItem("input", hidden_bytes, 0.0, is_input=True),
        ActivationItem("norm1", hidden_bytes, 0.0),
        ActivationItem("qkv", 3 * hidden_bytes, 6.0 * tokens * h * h),
        ActivationItem("attention", hidden_bytes, 2.0 * s * tokens * h),   # causal: half of 4 s^2*b*h
        ActivationItem("proj", hidden_bytes, 2.0 * tokens * h * h),
        ActivationItem("norm2", hidden_bytes, 0.0),
        ActivationItem("fc1", 4 * hidden_bytes, 8.0 * tokens * h * h),
        ActivationItem("gelu", 4 * hidden_bytes, 0.0),
        ActivationItem("fc2", hidden_bytes, 8.0 * tokens * h * h),
    )
