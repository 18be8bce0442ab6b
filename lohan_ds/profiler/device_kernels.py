"""`DeviceKernels`: on meta tensors, what a device's own kernels save and allocate where torch's meta path does not.

Attention: meta tensors would take the unfused path, with score matrices of (B, H, T, S) that no fused kernel keeps.
The fused ones (flash, efficient, and the CPU's flash) all save query, key, value, mask, output and the logarithm of
the row sums, (B, H, T) fp32. Dropout: a GPU saves a mask of 1 byte an element, a CPU one of the input's dtype. Grouped
products, of a mixture of experts: torch's meta version takes bf16 of some shapes only.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lohan_ds.profiler.op_flops import attention_flops, grouped_product_flops
from lohan_ds.profiler.op_trace import OpTrace


_GROUPED_MM = tuple(func for func in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
                    if func is not None)   # not in every version of torch


class DeviceKernels(TorchFunctionMode):
    """Stands in for the kernels of a device of `device_type`, "cuda" or "cpu".

    Afterwards `num_fused_attention` and `num_unfused_attention` tell how often there was a kernel for it. The CPU's has
    no dropout, no gradient of the mask, and values as wide as the queries.
    """

    def __init__(self, trace: OpTrace, device_type: str):
        super().__init__()
        self._trace = trace
        self._is_cpu = device_type == "cpu"
        self.num_fused_attention = 0
        self.num_unfused_attention = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _GROUPED_MM:
            return self._multiply_groups(*args, **kwargs)
        if func is F.dropout and not self._is_cpu:
            return self._drop(*args, **kwargs)
        return func(*args, **kwargs)

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1 or inplace:
            return F.dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0]

    def _multiply_groups(self, rows: Tensor, weights: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
                         out_dtype: torch.dtype | None = None) -> Tensor:
        """rows (S, K), weights (G, K, N), offs (G,): the arguments of torch._grouped_mm."""
        product_SN = _GroupedProduct.apply(self._trace, rows, weights, offs)
        product_SN = product_SN if out_dtype is None else product_SN.to(out_dtype)
        return product_SN if bias is None else product_SN + bias

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                enable_gqa: bool = False) -> Tensor:
        """query (B, H, T, D), key (B, H or fewer, S, D), value (the same, E wide)."""
        fits = query.dim() == 4
        if self._is_cpu and (dropout_p or value.shape[-1] != query.shape[-1]
                             or (attn_mask is not None and attn_mask.requires_grad)):
            fits = False
        if fits:
            self.num_fused_attention += 1
            return _Attention.apply(self._trace, query, key, value, attn_mask)
        self.num_unfused_attention += 1
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                                              enable_gqa=enable_gqa)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trace: OpTrace, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        size_b, size_h, size_t, _ = query.shape
        out_BHTE = query.new_empty(size_b, size_t, size_h, value.shape[-1]).transpose(1, 2)   # as kernels lay it out
        row_sums_BHT = query.new_empty(size_b, size_h, size_t, dtype=torch.float32)
        inputs = [t for t in (query, key, value, mask) if t is not None]
        trace.record(inputs, (out_BHTE, row_sums_BHT), attention_flops(query, key, value))
        ctx.save_for_backward(query, key, value, mask, out_BHTE, row_sums_BHT)
        return out_BHTE

    @staticmethod
    def backward(ctx, grad_BHTE: Tensor):
        inputs = ctx.saved_tensors[:4]
        return None, *(torch.empty_like(t) if needed else None for t, needed in zip(inputs, ctx.needs_input_grad[1:]))


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trace: OpTrace, rows: Tensor, weights: Tensor, offs: Tensor | None) -> Tensor:
        product_SN = rows.new_empty(rows.shape[0], weights.shape[-1])
        trace.record((rows, weights), (product_SN,), grouped_product_flops(rows, weights))
        ctx.save_for_backward(rows, weights, offs)
        return product_SN

    @staticmethod
    def backward(ctx, grad_SN: Tensor):
        rows, weights, _ = ctx.saved_tensors
        return None, torch.empty_like(rows), torch.empty_like(weights), None
