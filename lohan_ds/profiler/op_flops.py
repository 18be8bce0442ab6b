"""Floating-point operations of one operator, by torch's own formulas: a product of (m, k) and (k, n) counts 2mkn.

Attention counts both products over all pairs of tokens, also where a causal kernel skips half of them. Everything that
is not a matrix product or a convolution counts nothing.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

def op_flops(func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Of one call that an operator was dispatched with; `out` is its result."""
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """query (B, H, T, D), key (B, H or fewer heads, S, D), value (the same, E wide): of a fused kernel's forward."""
    num_heads = query.shape[1]
    key_shape = (key.shape[0], num_heads, *key.shape[2:])
    value_shape = (value.shape[0], num_heads, *value.shape[2:])
    return int(sdpa_flop_count(query.shape, key_shape, value_shape))


def grouped_product_flops(rows: Tensor, weights: Tensor) -> int:
    """rows (S, K), each multiplied with one of weights (G, K, N)."""
    return 2 * rows.shape[0] * rows.shape[1] * weights.shape[-1]
