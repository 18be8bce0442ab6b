"""A user's script with Hugging Face Trainer; it knows nothing of lohan. One argument: a JSON of what to do."""
import json
import os
import signal
import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deepspeed.ops import __compatible_ops__  # noqa: E402 - after what a user imports

__compatible_ops__["deepspeed_shm_comm"] = False   # else it is compiled: a collective of ranks, of which there is one
job = json.loads(sys.argv[-1])


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 129, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class KillAt(TrainerCallback):
    """kill -9 right after a step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == job["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)


def best_tokens(logits, labels):
    return logits.argmax(-1)


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]).mean())}


arguments = TrainingArguments(
    output_dir=job["out"], deepspeed=job["ds_config"], per_device_train_batch_size=2, gradient_accumulation_steps=4,
    max_steps=6, save_steps=3, eval_steps=3, eval_strategy="steps", logging_steps=1, learning_rate=1e-3,
    lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0, report_to=[], seed=3,
    disable_tqdm=True, gradient_checkpointing=job.get("gradient_checkpointing", False),
    load_best_model_at_end=job.get("best", False), greater_is_better=True if job.get("best") else None)
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
trainer = Trainer(model=model, args=arguments, train_dataset=Batches(),
                  eval_dataset=torch.utils.data.Subset(Batches(), range(4)), compute_metrics=accuracy,
                  preprocess_logits_for_metrics=best_tokens)
if "kill_at" in job:
    trainer.add_callback(KillAt())
trainer.train(resume_from_checkpoint=job.get("resume"))
trainer.save_model(job["out"] + "/final")
kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
with open(job["out"] + "/report.json", "w") as file:
    json.dump({"engine": type(trainer.model_wrapped).__name__, "num_parameters": trainer.model.num_parameters(),
               "log": [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]}, file)
if job.get("train_twice"):
    before = trainer.evaluate()["eval_loss"]
    try:
        trainer.train()
    except RuntimeError as error:
        refusal = f"{type(error).__name__}: {error}"
    trainer.save_model(job["out"] + "/after")
    predicted = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
    with open(job["out"] + "/second.json", "w") as file:
        json.dump({"refusal": refusal, "losses": [before, trainer.evaluate()["eval_loss"], predicted]}, file)
