"""`Trainer`, and those of plain torch: one side's way to train, phase by phase."""
from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lohan_ds.adam import AdamHyper, adam_update_
from lohan_ds.bench.case import Case
from lohan_ds.grad_norm import clip_coefficient, global_norm, sum_of_squares

HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
TORCH_HYPER = {"lr": HYPER.lr, "betas": (HYPER.beta1, HYPER.beta2), "eps": HYPER.eps,
               "weight_decay": HYPER.weight_decay}


class Trainer(Protocol):
    """All from one thread."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The scalar loss."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> None:
        """Clips, updates, and leaves no gradient behind."""

    def grad_norm(self) -> float | None:
        """Of the last step, before clipping; None if it was not needed."""

    def settle(self) -> None:
        """Waits until nothing of the last step is still under way."""

    def close(self) -> None: ...


class PlainTrainer:
    """Everything in memory. bf16 parameters have fp32 masters."""

    def __init__(self, model: nn.Module, case: Case, own_adam: bool):
        """`own_adam`: lohan's Adam in place of torch's fused one."""
        if case.dtype == "bf16":
            model.to(torch.bfloat16)
        self.model, self.limit, self.own_adam, self.norm = model, case.clip_limit, own_adam, None
        self.params = list(model.parameters())
        self.is_mixed = case.dtype == "bf16"
        self.masters = [p.detach().float() for p in self.params] if self.is_mixed else self.params
        if own_adam:
            self.moments = [(torch.zeros_like(m, requires_grad=False), torch.zeros_like(m, requires_grad=False))
                            for m in self.masters]
        else:
            if self.is_mixed:
                for master in self.masters:
                    master.grad = torch.zeros_like(master)
            self.optimizer = torch.optim.AdamW(self.masters, fused=True, **TORCH_HYPER)
        self.num_steps = 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.num_steps += 1
        if self.own_adam:
            self._step_by_own_adam()
        else:
            self._step_by_torch()
        self.model.zero_grad(set_to_none=True)

    def _step_by_torch(self) -> None:
        if self.is_mixed:
            for master, param in zip(self.masters, self.params):
                master.grad.copy_(param.grad)
                param.grad = None
        if self.limit:
            self.norm = nn.utils.clip_grad_norm_(self.masters, self.limit).item()
        self.optimizer.step()
        if self.is_mixed:
            torch._foreach_copy_(self.params_data, self.masters)

    def _step_by_own_adam(self) -> None:
        coefficient = 1.0
        if self.limit:
            self.norm = global_norm([part for p in self.params for part in sum_of_squares(p.grad.view(-1))])
            coefficient = clip_coefficient(self.norm, self.limit)
        for param, master, moments in zip(self.params, self.masters, self.moments):
            adam_update_(master.detach().view(-1), param.grad.view(-1), moments[0].view(-1), moments[1].view(-1),
                         self.num_steps, HYPER, coefficient, out=param.data.view(-1) if self.is_mixed else None)

    @property
    def params_data(self) -> list[Tensor]:
        return [param.data for param in self.params]

    def grad_norm(self) -> float | None:
        return self.norm

    def settle(self) -> None:
        """Nothing runs in the background."""

    def close(self) -> None:
        """Nothing is held but memory."""


class ComputeTrainer:
    """Forward and backward only; the gradients are dropped."""

    def __init__(self, model: nn.Module, case: Case):
        self.model = model.to(torch.bfloat16) if case.dtype == "bf16" else model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def grad_norm(self) -> float | None:
        return None

    def settle(self) -> None:
        """Nothing runs in the background."""

    def close(self) -> None:
        """Nothing is held but memory."""


class Fsdp2Trainer:
    """`fully_shard` over a mesh of one CPU, with CPUOffloadPolicy; masters and moments in fp32."""

    def __init__(self, model: nn.Module, case: Case):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (1,)),
                                   "offload_policy": CPUOffloadPolicy(pin_memory=False)}
        if case.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                        cast_forward_inputs=not case.fp32_gemms)
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        self.model, self.limit, self.norm = model, case.clip_limit, None
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **TORCH_HYPER)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.limit:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.limit).full_tensor().item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def grad_norm(self) -> float | None:
        return self.norm

    def settle(self) -> None:
        """Nothing runs in the background."""

    def close(self) -> None:
        torch.distributed.destroy_process_group()
