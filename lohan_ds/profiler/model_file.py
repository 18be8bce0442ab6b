"""`ModelFile`: a `ModelProfile` as a JSON file, to plan with where the model cannot be built. No torch.

What `lohan plan --save-model-profile` writes and `--model-profile` reads.
"""
from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from lohan_ds.errors import ConfigError
from lohan_ds.profile import ModelProfile

FORMAT = 1


class ModelFile(BaseModel):
    """A profile and how it was found."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    name: str                # of the model, for people
    device_type: str         # whose attention kernels were assumed: "cuda" or "cpu"
    attention: str           # what was assumed of them, for people
    loss: str = ""           # how head and loss are computed, for people
    profile: ModelProfile

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ModelFile:
        size, units = self.profile.size, self.profile.units
        if [block.index for block in size.blocks] != list(range(len(size.blocks))):
            raise ValueError("profile.size.blocks: must be numbered from 0")
        if len(size.units) != len(units):
            raise ValueError(f"profile.units: {len(units)}, but profile.size.units: {len(size.units)}")
        if not units or any(not 0 <= index < len(size.blocks) for unit in size.units for index in unit):
            raise ValueError("profile.size.units: must name blocks that there are")
        return self


def save_model(file: ModelFile, path: str | Path) -> None:
    """OSError if it cannot be written."""
    Path(path).write_text(file.model_dump_json(indent=1) + "\n")


def load_model(path: str | Path) -> ModelFile:
    """ConfigError, naming the file and the key, if it is not there or no model profile."""
    try:
        return ModelFile.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: is not a model profile: {key}: {first['msg']}") from error
