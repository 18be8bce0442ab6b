"""The ZeRO-3 parameter protocol on top of the streamer: what `GatheredParameters` and its users call.

DeepSpeed and the libraries around it reach partitioned parameters through attributes of the parameter object
(`ds_status`, `all_gather`, `partition` ...). `zero.Init` puts them there; here they are pointed at our store.
"""
from __future__ import annotations

import torch
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from torch import nn

from lohan_ds.runtime.param_streamer import ParamStreamer


def convert_to_zero3(model: nn.Module, ds_config: dict) -> None:
    """Gives every parameter the ZeRO-3 attributes, as `zero.Init` would have; values stay on the host."""
    if any(not hasattr(param, "ds_id") for param in model.parameters()):
        Init(module=model, remote_device="cpu", config_dict_or_path=ds_config)


def set_status(param: nn.Parameter, available: bool) -> None:
    param.ds_status = ZeroParamStatus.AVAILABLE if available else ZeroParamStatus.NOT_AVAILABLE


class _Gathered:
    """The handle that `all_gather_coalesced` returns; ours are complete."""

    def wait(self, **_) -> None:
        pass


class ZeroParams:
    """Rebinds the gather and release functions of every parameter to one streamer."""

    def __init__(self, streamer: ParamStreamer, params: list[nn.Parameter]):
        self._streamer = streamer
        self._gathered: dict[int, nn.Parameter] = {}
        for param in params:
            self._rebind(param)

    def _rebind(self, param: nn.Parameter) -> None:
        def all_gather(param_list=None, async_op=False, hierarchy=0):
            return self._gather([param] if param_list is None else param_list)

        def all_gather_coalesced(params, *_, **__):
            return self._gather(params)

        def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
            self._partition([param] if param_list is None else param_list, has_been_updated)

        param.all_gather, param.all_gather_coalesced, param.partition = all_gather, all_gather_coalesced, partition
        param.__dict__.pop("item", None)   # DeepSpeed's gathers and never partitions; the look itself fetches
        param.nvme_swapper = None
        param.ds_persist = False
        param.ds_tensor.data = torch.empty(0, dtype=param.ds_tensor.dtype)

    def _gather(self, params) -> _Gathered:
        fresh = [p for p in params if id(p) not in self._gathered]
        self._streamer.gather(fresh)
        self._gathered.update((id(p), p) for p in fresh)
        return _Gathered()

    def _partition(self, params, has_been_updated: bool) -> None:
        held = [p for p in params if self._gathered.pop(id(p), None) is not None]
        self._streamer.ungather(held, edited=has_been_updated)
