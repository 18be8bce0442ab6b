"""The profile of an engine's model: that of the model itself, without touching it or asking whether its twin fits."""
from __future__ import annotations

import pytest
import torch

import lohan_ds  # noqa: F401 - attaches to transformers
from lohan_ds.errors import ConfigError
from lohan_ds.integrations import admission
from lohan_ds.integrations.live_model import profile_live
from lohan_ds.profiler.model import profile_model
from lohan_ds.testing.models import OddModel, lm_batch, tiny_gpt2, tiny_llama, vocab_of


@pytest.mark.parametrize("make", [lambda: tiny_llama(tied=True), tiny_gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_models_own(make, dtype):
    model = make().to(dtype)
    frozen = next(model.parameters()).requires_grad_(False)
    found = profile_live(model, 2, 16, "cpu")
    expected, _ = profile_model(model, lm_batch(vocab_of(model), 2, 16), 2, 16, "cpu")
    assert found == expected
    assert not frozen.requires_grad and not any(param.is_meta for param in model.parameters())


def test_the_twin_is_not_checked_for_room(monkeypatch):
    asked = []
    monkeypatch.setattr(admission, "_active_config", lambda: asked.append(1) or (None, None))
    import deepspeed  # noqa: F401 - only then there may be a config of it
    model = tiny_llama()
    num_asked = len(asked)
    profile_live(model, 2, 16, "cpu")
    assert len(asked) == num_asked > 0
    tiny_llama()
    assert len(asked) == 2 * num_asked


def test_what_cannot_be_told_is_said():
    with pytest.raises(ConfigError, match="OddModel is no model of transformers"):
        profile_live(OddModel(), 2, 16, "cpu")
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="has gradient checkpointing switched on"):
        profile_live(model, 2, 16, "cpu")
