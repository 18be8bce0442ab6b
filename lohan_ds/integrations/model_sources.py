"""Models on the meta device from what Hugging Face calls a model: a folder with a config.json, the file, or the config.

transformers and diffusers both describe a model by one JSON. No weights are read and nothing is downloaded.
"""
from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lohan_ds.errors import ConfigError
from lohan_ds.profiler.model import find_loss

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModelForMaskedLM",
                 "AutoModelForImageClassification", "AutoModelForSpeechSeq2Seq", "AutoModel")
_TEXT_TOKENS = 77      # of the caption that a diffusion transformer is shown


@dataclass(frozen=True)
class ModelSource:
    """A model with arguments for one micro-batch, all on meta, ready for `profile_model`."""
    model: nn.Module
    inputs: dict[str, Any]                 # keyword arguments of its forward
    loss_of: Callable[[Any], Any]          # of its output
    description: str                       # class and where it came from


def model_from(source: str | Path | Any, micro_batch: int, sequence_length: int, dtype: torch.dtype = torch.bfloat16,
               fused_attention: bool = True) -> ModelSource:
    """`source`: a folder, a config.json, or a transformers config. The model is in training mode, as Trainer has it.

    sequence_length: tokens per sequence; of an encoder-decoder, on each side; an image model has its own.
    fused_attention: whether the device has such kernels; without, "eager" attention is what transformers is told.
    ConfigError if there is no such model, or its arguments cannot be told.
    """
    if isinstance(source, (str, Path)):
        path = _config_path(Path(source))
        content = _read(path)
        if "_class_name" in content:
            return _diffusers_model(content, path, micro_batch, dtype)
        config, origin = _transformers_config(path), str(path.parent)
    else:
        config, origin = source, "its config"
    model = _transformers_model(config, dtype, fused_attention)
    inputs = example_inputs(model, micro_batch, sequence_length, dtype)
    return ModelSource(model, inputs, find_loss, f"{type(model).__name__} from {origin}")


def _config_path(path: Path) -> Path:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; name a model folder with a config.json, or the file")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: is not a model's config: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is not a model's config, but a {type(content).__name__}")
    return content


# -- transformers ------------------------------------------------------------------------------------------------------

def _transformers_config(path: Path) -> Any:
    import transformers
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{path}: transformers {transformers.__version__} cannot read it: {error}") from error


def _transformers_model(config: Any, dtype: torch.dtype, fused_attention: bool) -> nn.Module:
    import transformers
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    model_class = getattr(transformers, name, None) if name else None
    if model_class is None:
        model_class = _auto_model_class(transformers, config)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0   # some value: labels are shifted
    if getattr(config, "use_cache", False):
        config.use_cache = False
    try:
        from transformers.initialization import no_init_weights   # on meta there is nothing to initialize
        with torch.device("meta"), _no_chatter(transformers), no_init_weights():
            try:
                model = model_class._from_config(config, dtype=dtype,
                                                 attn_implementation="sdpa" if fused_attention else "eager")
            except ValueError:      # it has no such attention
                model = model_class._from_config(config, dtype=dtype, attn_implementation="eager")
        model.tie_weights()
    except Exception as error:
        raise ConfigError(f"{model_class.__name__} cannot be built from its config: {error}") from error
    return model.train()


def _auto_model_class(transformers: Any, config: Any) -> type[nn.Module]:
    names = sorted(_AUTO_CLASSES, key=lambda name: ("Seq2Seq" in name) != config.is_encoder_decoder)   # stable
    for auto_name in names:
        mapping = getattr(transformers, auto_name)._model_mapping
        if type(config) in mapping.keys():
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ConfigError(f"transformers has no model class for {type(config).__name__}")


@contextlib.contextmanager
def _no_chatter(transformers: Any):
    """Without its remarks about a model that is never going to generate."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def example_inputs(model: Any, micro_batch: int, sequence_length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """As a data collator would make them; labels where the model takes some."""
    main = model.main_input_name
    if main == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        size = vision.image_size if isinstance(vision.image_size, (tuple, list)) else (vision.image_size,) * 2
        pixels = torch.empty(micro_batch, vision.num_channels, *size, dtype=dtype, device="meta")
        return {main: pixels, **_labels(model, (micro_batch,))}
    if main != "input_ids":
        raise ConfigError(f"{type(model).__name__} takes {main!r}, for which there is no example; call profile_model "
                          "with example inputs of your own")
    ids_BT = _token_ids(micro_batch, sequence_length)
    return {main: ids_BT, **_labels(model, (micro_batch, sequence_length))}


def _labels(model: Any, shape: tuple[int, ...]) -> dict[str, Tensor]:
    from transformers.utils.generic import find_labels
    if "labels" not in find_labels(type(model)):
        return {}
    return {"labels": _token_ids(*shape)}


def _token_ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


# -- diffusers ---------------------------------------------------------------------------------------------------------

def _diffusers_model(content: dict[str, Any], path: Path, micro_batch: int, dtype: torch.dtype) -> ModelSource:
    """A diffusion transformer: noisy latents, timestep and condition in, prediction out, mean squared error."""
    name = content["_class_name"]
    try:
        diffusers = importlib.import_module("diffusers")   # not a dependency: only for models that come from it
    except ImportError as error:
        raise ConfigError(f"{path}: {name} is a model of diffusers, which is not installed") from error
    try:
        with torch.device("meta"):
            model = nn.Module.to(getattr(diffusers, name).from_config(content), dtype=dtype).train()
            return ModelSource(model, _latent_inputs(model, micro_batch, dtype), _squared_error,
                               f"{name} from {path.parent}")
    except Exception as error:
        raise ConfigError(f"{path}: diffusers {diffusers.__version__} cannot build {name}, or its arguments cannot be "
                          f"told from its config: {error!r}; call profile_model with a model and example inputs of "
                          "your own") from error


def _latent_inputs(model: Any, micro_batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Those of the arguments known here that its forward has. KeyError if the config lacks a size."""
    config, has = model.config, inspect.signature(model.forward).parameters
    size = config["sample_size"]
    inputs = {"hidden_states": torch.empty(micro_batch, config["in_channels"], size, size, dtype=dtype),
              "timestep": _token_ids(micro_batch)}
    if "class_labels" in has:
        inputs["class_labels"] = _token_ids(micro_batch)
    if "encoder_hidden_states" in has:
        width = next(config[key] for key in ("caption_channels", "joint_attention_dim", "cross_attention_dim")
                     if config.get(key))
        inputs["encoder_hidden_states"] = torch.empty(micro_batch, _TEXT_TOKENS, width, dtype=dtype)
    if "pooled_projections" in has:
        inputs["pooled_projections"] = torch.empty(micro_batch, config["pooled_projection_dim"], dtype=dtype)
    if "added_cond_kwargs" in has:
        inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    return inputs


def _squared_error(output: Any) -> Tensor:
    """Of a prediction (B, C, height, width) against noise, which has no part in the graph."""
    prediction = output[0].float()
    return nn.functional.mse_loss(prediction, torch.empty_like(prediction, requires_grad=False))
