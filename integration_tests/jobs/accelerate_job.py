"""A user's script with Accelerate: a dict with "auto" in it, a plain loop. Prints one JSON line at the end."""
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import AutoModelForCausalLM

from deepspeed.ops import __compatible_ops__  # noqa: E402 - after what a user imports

__compatible_ops__["deepspeed_shm_comm"] = False   # else it is compiled: a collective of ranks, of which there is one
job = json.loads(sys.argv[-1])
plugin = DeepSpeedPlugin(hf_ds_config=job["ds_config"]) if job.get("in_code") else None
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = [torch.randint(0, 129, (12,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
loader = torch.utils.data.DataLoader([{"input_ids": x, "labels": x} for x in ids], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model.eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(12)[None]).logits, job["out"] + "/logits.pt")
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(job["out"] + "/final", state_dict=state)
with open(job["out"] + "/report.json", "w") as file:
    json.dump({"engine": type(model).__name__, "losses": losses}, file)
