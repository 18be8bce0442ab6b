"""Where lohan attaches to Accelerate and transformers. Each function gets the module that was just imported."""
from __future__ import annotations

import functools
import sys

from lohan_ds.config import effective_ds_config, parse


def patch_accelerate(module) -> None:
    """`HfDeepSpeedConfig`, which Trainer and Accelerate both read a JSON through, checks the lohan section and turns
    ZeRO-Infinity's keys and the literal "auto" inside it into what the later passes can stand."""
    config_class = module.HfDeepSpeedConfig
    original = config_class.__init__

    @functools.wraps(original)
    def checked(self, config_file_or_dict):
        original(self, config_file_or_dict)
        if "lohan" in self.config and parse(self.config) is not None:
            if "stage" not in self.config.get("zero_optimization", {}):
                self.config.setdefault("zero_optimization", {})["stage"] = 3
            self.config = effective_ds_config(self.config)
            self.set_stage_and_offload()

    config_class.__init__ = checked


def patch_transformers(module) -> None:
    """A model that does not fit is refused when its construction begins, before any weight is loaded."""
    model_class = module.PreTrainedModel
    original = model_class.__init__

    @functools.wraps(original)
    def admitted(self, config, *args, **kwargs):
        if "deepspeed" in sys.modules:   # else there is no config of it
            from lohan_ds.integrations import admission
            admission.check_before_loading(self, config)
        original(self, config, *args, **kwargs)

    model_class.__init__ = admitted
