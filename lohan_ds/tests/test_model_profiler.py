"""What `profile_model` works out on meta tensors, against the same model really run on the CPU."""
import json
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lohan_ds.errors import ConfigError
from lohan_ds.integrations.model_sources import model_from
from lohan_ds.profiler import unit_runs
from lohan_ds.profiler.model import find_loss, profile_model
from lohan_ds.profiler.model_report import model_table
from lohan_ds.testing.models import AlbertLike, BranchModel, OddModel, lm_batch, tiny_gpt2, tiny_llama

BATCH, SEQ = 2, 48
DROPOUT = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
MOE = dict(vocab_size=129, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
           num_key_value_heads=2, use_cache=False)


def tiny_t5(**over):
    from transformers import T5Config, T5ForConditionalGeneration
    config = dict(vocab_size=129, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, use_cache=False,
                  decoder_start_token_id=0)
    return T5ForConditionalGeneration(T5Config(**{**config, **over}))


def tiny_mixtral(**over):
    from transformers import MixtralConfig, MixtralForCausalLM
    return MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4, **over))


def tiny_qwen_moe(**over):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2))


def half_frozen():
    model = tiny_llama()
    for param in [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]:
        param.requires_grad_(False)
    return model


MODELS = {
    "llama eager": lambda: tiny_llama(vocab_size=129),
    "llama sdpa": lambda: tiny_llama(vocab_size=129, attn_implementation="sdpa"),
    "llama half frozen": half_frozen,
    "gpt2 dropout": lambda: tiny_gpt2(**DROPOUT),
    "gpt2 sdpa": lambda: tiny_gpt2(attn_implementation="sdpa"),
    "gpt2 sdpa dropout": lambda: tiny_gpt2(attn_implementation="sdpa", **DROPOUT),   # no such kernel on a CPU
    "t5": tiny_t5,
    "mixtral": tiny_mixtral,
    "qwen moe": tiny_qwen_moe,
    "odd": OddModel,
    "albert": AlbertLike,
    "branch": BranchModel,
}


def batch_for(model):
    return lm_batch(129 if not isinstance(model, BranchModel | AlbertLike) else 128, BATCH, SEQ)


def profile_on_cpu(model, inputs=None, **over):
    return profile_model(model, inputs or batch_for(model), BATCH, SEQ, device_type="cpu", **over)


def really_saved_bytes(model, inputs, loss_of=find_loss):
    """Bytes of the storages that autograd keeps, each once, without parameters and buffers."""
    permanent = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in permanent:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model(**inputs))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def real_peak_bytes(model, inputs):
    """The most that forward and backward have allocated at once; gradients of parameters are gone as they come."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        output = model(**inputs)
        find_loss(output).backward()
    now = peak = 0
    for event in events.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def item_bytes(units):
    return sum(item.nbytes for unit in units for item in unit.items)


def numel_of(profile):
    return sum(slot.numel for block in profile.size.blocks for slot in block.slots)


# -- truth -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_saved_are_those_of_a_real_forward(name, dtype):
    model = MODELS[name]().to(dtype).train()
    found, report = profile_on_cpu(model)
    truth = really_saved_bytes(model, batch_for(model))
    # bf16: a CPU's layer norm keeps mean and deviation in bf16, all others in fp32: 4 bytes a token, here a lot
    assert report.saved_bytes == truth if dtype is torch.float32 else truth <= report.saved_bytes <= 1.012 * truth
    assert report.saved_bytes <= item_bytes(found.units)   # which also has inputs that only recomputing needs


@pytest.mark.parametrize("name", ["llama eager", "gpt2 dropout", "t5", "odd"])
def test_flops_are_those_of_a_real_forward(name):
    model = MODELS[name]()
    found, _ = profile_on_cpu(model)
    with FlopCounterMode(display=False) as counter:
        model(**batch_for(model))
    assert sum(unit.forward_flops for unit in found.units) == counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama sdpa", "mixtral"])
def test_flops_are_those_of_the_formula(name):
    model = MODELS[name]().train()
    found, _ = profile_on_cpu(model)
    config, tokens = model.config, BATCH * SEQ
    active = sum(p.numel() for n, p in model.named_parameters() if "norm" not in n and "embed" not in n)
    if name == "mixtral":   # two of four experts for each token
        active -= sum(p.numel() for n, p in model.named_parameters() if "experts" in n) / 2
    attention = 4 * BATCH * SEQ ** 2 * config.hidden_size * config.num_hidden_layers
    assert sum(unit.forward_flops for unit in found.units) == pytest.approx(2 * active * tokens + attention, rel=1e-3)


WIDE = {    # their peak is where the gradient of the tied vocabulary is, or where it is summed
    "llama wide": lambda: tiny_llama(tied=True, vocab_size=9000),
    "t5 wide": lambda: tiny_t5(vocab_size=9000),
    "untied wide": lambda: tiny_llama(vocab_size=9000, attn_implementation="sdpa"),
}


@pytest.mark.parametrize("name", ["llama eager", "gpt2 dropout", "t5", "mixtral", "albert", *WIDE])
def test_peak_is_not_below_a_real_one_and_close(name):
    model = (MODELS | WIDE)[name]().train()
    found, _ = profile_on_cpu(model)
    truth = real_peak_bytes(model, batch_for(model))
    planned = max(item_bytes(found.units[:index + 1]) + unit.workspace_bytes + unit.output_bytes
                  for index, unit in enumerate(found.units))
    assert truth <= planned <= 1.06 * truth


@pytest.mark.parametrize("name", ["llama sdpa", "t5", "mixtral", "gpt2 dropout"])
def test_stand_ins_give_what_running_every_unit_gives(name, monkeypatch):
    model = MODELS[name]()
    quick, quick_report = profile_on_cpu(model)
    record = unit_runs.UnitRecord
    monkeypatch.setattr(unit_runs, "UnitRecord", lambda *values: record(*values)._replace(can_stand_in=False))
    whole, whole_report = profile_on_cpu(model)
    assert quick_report.saved_bytes == whole_report.saved_bytes
    for unit, twin in zip(quick.units, whole.units, strict=True):   # what else is alive meanwhile differs a little
        assert unit.workspace_bytes == pytest.approx(twin.workspace_bytes, rel=0.2)
        assert replace(unit, workspace_bytes=0, unit_class="") == replace(twin, workspace_bytes=0, unit_class="")


# -- items -----------------------------------------------------------------------------------------------------------

def test_items_of_a_llama_layer_by_module():
    found, report = profile_on_cpu(MODELS["llama sdpa"]().to(torch.bfloat16))
    tokens, bf16 = BATCH * SEQ, 2
    layer = next(unit for unit in found.units if unit.name == "model.layers.1")
    items = {item.name: item for item in layer.items}
    assert list(items)[0] == "input" and items["input"].is_input and items["input"].recompute_flops == 0
    assert items["input"].nbytes == tokens * 64 * bf16
    assert items["mlp.up_proj"].nbytes == tokens * 96 * bf16
    assert items["mlp.up_proj"].recompute_flops == 2 * tokens * 64 * 96
    assert items["self_attn.v_proj"].nbytes == tokens * 32 * bf16        # half as many heads
    # rotated query and key, output and fp32 row sums of the kernel; made from two projections and attention
    assert items["self_attn"].nbytes == tokens * (64 + 32 + 64) * bf16 + BATCH * 4 * SEQ * 4
    assert items["self_attn"].recompute_flops == 2 * tokens * 64 * (64 + 32) + 4 * BATCH * SEQ ** 2 * 64
    assert layer.output_bytes == tokens * 64 * bf16
    # the last product of a layer is nobody's to make again: its result is the next layer's input
    rest = layer.forward_flops - sum(item.recompute_flops for item in layer.items)
    assert rest == 2 * tokens * 96 * 64
    assert report.attention == "fused kernel on cpu: no score matrices"


def test_logits_and_loss_are_the_heads():
    vocab = 5000
    found, _ = profile_on_cpu(tiny_llama(vocab_size=vocab).to(torch.bfloat16))
    head = found.units[-1]
    items = {item.name: item for item in head.items}
    logits = BATCH * SEQ * vocab
    assert items["loss"].nbytes == pytest.approx(logits * 4, rel=0.001)       # log-softmax, fp32
    assert items["loss"].recompute_flops == 2 * 64 * logits
    assert head.output_bytes == logits * 2
    assert head.workspace_bytes >= logits * 4                                 # its gradient


def test_what_no_unit_can_swap_is_marked():
    """Head and loss are outside of units, or in tiles; `temperature` makes the whole odd model a unit with others."""
    found, _ = profile_on_cpu(tiny_llama())
    assert {unit.name for unit in found.units for item in unit.items if item.is_outside} == {"lm_head"}
    assert "loss" in {item.name for item in found.units[-1].items} and all(i.is_outside for i in found.units[-1].items)
    found, _ = profile_on_cpu(OddModel())
    outer, inner = found.units[0], next(unit for unit in found.units if unit.name == "layers.1")
    assert outer.name == "OddModel" and all(item.is_outside for item in outer.items)
    assert inner.items and not any(item.is_outside for item in inner.items)


def test_tensors_shared_by_layers_count_once():
    found, _ = profile_on_cpu(MODELS["llama sdpa"]())
    first, second = (unit for unit in found.units if unit.name in ("model.layers.0", "model.layers.1"))
    tables = 2 * SEQ * 16 * 4                                                 # cosines and sines of the positions
    assert item_bytes([first]) - item_bytes([second]) == tables
    encoded = BATCH * SEQ * 64 * 4
    found, _ = profile_on_cpu(tiny_t5())
    inputs = [next(item.nbytes for item in unit.items if item.is_input)
              for unit in found.units if unit.name.startswith("decoder.block")]
    assert inputs[0] == 2 * encoded                                           # its own input and the encoder's output
    assert inputs[2] == encoded


def test_equal_classes_of_units_cost_the_same():
    found, _ = profile_on_cpu(tiny_llama(num_hidden_layers=5))
    classes = Counter(unit.unit_class for unit in found.units)
    assert classes["LlamaDecoderLayer"] == 1 and classes["LlamaDecoderLayer:2"] == 4
    by_class = {}
    for unit in found.units:
        alike = replace(unit, name="", blocks=())
        assert by_class.setdefault(unit.unit_class, alike) == alike


def test_units_and_blocks_are_those_of_the_split():
    model = tiny_gpt2()
    found, _ = profile_on_cpu(model)
    assert [unit.name for unit in found.units] == ["transformer.wte", "transformer.wpe", "transformer.h.0",
                                                   "transformer.h.1", "transformer.ln_f", "lm_head"]
    assert tuple(unit.blocks for unit in found.units) == found.size.units
    assert found.units[-1].blocks == found.units[0].blocks                    # tied
    assert numel_of(found) == sum(p.numel() for p in model.parameters())


def test_what_a_gpu_saves_of_dropout_and_attention():
    model = MODELS["gpt2 sdpa dropout"]().to(torch.bfloat16)
    on_gpu, report = profile_model(model, batch_for(model), BATCH, SEQ, "cuda")
    on_cpu, cpu_report = profile_on_cpu(model)
    assert report.attention == "fused kernel on cuda: no score matrices"
    assert cpu_report.attention == "without a fused kernel: score matrices are saved"
    mask_bytes = [next(item.nbytes for item in found.units[1].items if item.name == "transformer.drop")
                  for found in (on_gpu, on_cpu)]
    assert mask_bytes == [BATCH * SEQ * 32, BATCH * SEQ * 32 * 2]
    _, eager_report = profile_on_cpu(tiny_gpt2())
    assert "eager" in eager_report.attention


# -- any module ------------------------------------------------------------------------------------------------------

class Plain(nn.Module):
    """No loss, no config, positional arguments, an in-place residual and a view of a weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4, 32))

    def forward(self, x, times):
        for index, layer in enumerate(self.layers):
            y = F.gelu(layer(x)) * self.scale[index]
            y += x
            x = y
        return {"x": x * times}


def test_plain_module_with_real_weights_stays_as_it_is():
    model, x = Plain(), torch.randn(8, 32)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    found, report = profile_model(model, (x, 2.0), 8, 1, "cpu")
    truth = really_saved_bytes(model, {"x": x, "times": 2.0}, lambda output: output["x"])
    assert report.saved_bytes == truth
    assert report.num_calls == 4
    assert sum(unit.forward_flops for unit in found.units) == 4 * 2 * 8 * 32 * 32
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1]) and param.grad is None
    assert all("forward" not in vars(module) for module in model.modules())
    assert not torch.nn.modules.module._global_forward_hooks


def test_looking_at_values_is_refused_and_the_module_named():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x[x.sum(1) > 0])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.picky = Picky()

        def forward(self, x):
            return self.picky(x)

    model = Outer()
    with pytest.raises(ConfigError, match="Outer cannot be told .* module 'picky' failed"):
        profile_model(model, (torch.randn(3, 4),), 3, 1)
    assert all("forward" not in vars(module) for module in model.modules())

    class Measuring(Picky):
        def forward(self, x):
            return self.inner(x) * float(x.max())

    with pytest.raises(ConfigError, match="looks at the values of its tensors .*float32 made by aten.max"):
        profile_model(Measuring(), (torch.randn(3, 4),), 3, 1)


def test_checkpoints_of_the_models_own_are_harmless():
    model = tiny_llama()
    plain, _ = profile_on_cpu(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found, report = profile_on_cpu(model.train())
    assert report.saved_bytes < item_bytes(plain.units)
    assert [unit.forward_flops for unit in found.units] == [unit.forward_flops for unit in plain.units]


# -- sources ---------------------------------------------------------------------------------------------------------

def write_config(folder, **content):
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def profile_source(source, batch=1, seq=64, **over):
    made = model_from(source, batch, seq, **over)
    return (*profile_model(made.model, made.inputs, batch, seq, "cuda", made.loss_of), made)


def test_175b_from_a_config_in_seconds(tmp_path):
    folder = write_config(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=12288, n_layer=96,
                          n_head=96, n_positions=2048)
    start = time.perf_counter()
    found, report, _ = profile_source(folder, 1, 2048)
    assert time.perf_counter() - start < 20      # a second when nobody else uses the machine; most of it imports
    assert numel_of(found) == pytest.approx(174.6e9, rel=1e-3)
    assert len(found.units) == 100 and report.num_run == 5 and report.num_calls == 100
    formula = 2 * numel_of(found) * 2048 + 4 * 2048 ** 2 * 12288 * 96
    assert sum(unit.forward_flops for unit in found.units) == pytest.approx(formula, rel=0.005)
    layers = [unit for unit in found.units if unit.name.startswith("transformer.h.")]
    assert len({replace(unit, name="", blocks=()) for unit in layers}) == 1


@pytest.mark.parametrize("content", [
    dict(model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
         vocab_size=99),
    dict(model_type="mixtral", **{k: v for k, v in MOE.items() if k != "use_cache"}),
    dict(model_type="t5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=99),
    dict(model_type="bert", architectures=["BertForMaskedLM"], hidden_size=64, num_hidden_layers=2,
         num_attention_heads=4, intermediate_size=96, vocab_size=99),
    dict(model_type="vit", architectures=["ViTForImageClassification"], hidden_size=64, num_hidden_layers=2,
         num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8),
    dict(model_type="llava", text_config=dict(model_type="llama", hidden_size=64, intermediate_size=96, vocab_size=99,
                                              num_hidden_layers=2, num_attention_heads=4),
         vision_config=dict(model_type="clip_vision_model", hidden_size=32, num_hidden_layers=2, image_size=28,
                            num_attention_heads=4, intermediate_size=64, patch_size=14, projection_dim=32)),
], ids=lambda content: content["model_type"])
def test_folders_of_transformers(tmp_path, content):
    found, report, made = profile_source(write_config(tmp_path, **content))
    assert "labels" in made.inputs and made.model.training
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in made.model.parameters())
    tokens = 64 if content["model_type"] != "vit" else 17
    assert sum(unit.forward_flops for unit in found.units) > 2 * tokens * 0.3 * numel_of(found) / 8
    assert report.num_fused_attention > 0


def test_config_object_and_file_and_eager_attention(tmp_path):
    config = tiny_llama().config
    config.save_pretrained(tmp_path)
    by_object, _, _ = profile_source(config, fused_attention=False)
    by_file, report, made = profile_source(tmp_path / "config.json", fused_attention=False)
    assert by_object == by_file and "eager" in report.attention
    assert made.description == f"LlamaForCausalLM from {tmp_path}"


def test_sources_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        model_from(tmp_path / "nowhere", 1, 8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not a model's config"):
        model_from(tmp_path, 1, 8)
    with pytest.raises(ConfigError, match="cannot read it"):
        model_from(write_config(tmp_path, model_type="no such model"), 1, 8)
    with pytest.raises(ConfigError, match="'input_features'"):
        model_from(write_config(tmp_path, model_type="whisper", d_model=48, encoder_layers=1, decoder_layers=1), 1, 8)


def test_diffusion_transformer(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    content = dict(_class_name="DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=16, in_channels=4,
                   num_layers=4, sample_size=32, patch_size=2, num_embeds_ada_norm=10)
    made = model_from(write_config(tmp_path, **content), BATCH, 256, torch.float32)
    found, report = profile_model(made.model, made.inputs, BATCH, 256, "cpu", made.loss_of)
    model = diffusers.DiTTransformer2DModel.from_config(content).train()
    inputs = dict(hidden_states=torch.randn(BATCH, 4, 32, 32), timestep=torch.zeros(BATCH, dtype=torch.long),
                  class_labels=torch.zeros(BATCH, dtype=torch.long))
    assert report.saved_bytes == really_saved_bytes(model, inputs, made.loss_of)
    blocks = [unit for unit in found.units if unit.name.startswith("transformer_blocks")]
    assert len(blocks) == 4 and report.num_run < report.num_calls
    with pytest.raises(ConfigError, match="sample_size"):
        flux = dict(_class_name="FluxTransformer2DModel", num_layers=1, num_single_layers=1)
        model_from(write_config(tmp_path, **flux), 1, 8)


def test_diffusers_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(ConfigError, match="which is not installed"):
        model_from(write_config(tmp_path, _class_name="DiTTransformer2DModel"), 1, 8)


def test_table_has_a_row_for_every_kind_of_unit_and_item():
    found, _ = profile_on_cpu(tiny_llama())
    table = model_table(found)
    kinds = {unit.unit_class: len(unit.items) for unit in found.units}
    assert table.row_count == sum(1 + num_items for num_items in kinds.values())


@pytest.mark.parametrize("name", ["llama eager", "gpt2 dropout", "t5"])
def test_a_head_that_computes_in_tiles(name):
    """Logits, what is saved of them, and what the caller holds of them are gone; everything else is as it was."""
    inputs = batch_for(MODELS[name]())
    whole, whole_report = profile_on_cpu(MODELS[name](), inputs)
    tiled, tiled_report = profile_on_cpu(MODELS[name](), inputs, loss_tile_tokens=16)
    vocabulary, hidden = whole.size.blocks[0].slots[0].shape
    tokens = BATCH * SEQ
    assert (tiled.size, len(tiled.units)) == (whole.size, len(whole.units))
    head, whole_head = tiled.units[-1], whole.units[-1]
    assert whole_head.output_bytes == tokens * vocabulary * 4 and head.output_bytes == 4
    assert item_bytes([head]) < item_bytes([whole_head]) - tokens * vocabulary * 4 + 8 * tokens
    assert head.workspace_bytes < 16 * vocabulary * 4 * 5 + 4 * 4 * vocabulary * hidden < whole_head.workspace_bytes * 4
    assert head.forward_flops == pytest.approx(whole_head.forward_flops * 4 / 3)
    for ours, theirs in zip(tiled.units[:-1], whole.units[:-1]):
        assert ours.forward_flops == theirs.forward_flops and ours.workspace_bytes <= theirs.workspace_bytes
        assert [item for item in ours.items if item.name != "outside"] == list(theirs.items)
    assert tiled_report.loss.startswith("in tiles of 16 tokens") and whole_report.loss.startswith("all logits at once")
