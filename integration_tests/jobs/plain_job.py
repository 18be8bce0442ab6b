"""A user's plain DeepSpeed script; it knows nothing of lohan. Its last line is a JSON of what it saw."""
import argparse
import json

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False   # else it is compiled, for ranks that are not there
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--zero-init", action="store_true")
args = parser.parse_args()


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


if args.zero_init:
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = make_model()
else:
    model = make_model()
engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
losses = []
for step in range(6):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    total = sum(p.double().sum().item() for p in engine.module.parameters())
print("REPORT", json.dumps({
    "engine": type(engine).__name__, "optimizer": type(optimizer).__name__, "losses": losses, "total": total,
    "linear": torch.nn.functional.linear.__module__, "lr": engine.get_lr()[0]}))
