"""Where lohan attaches to DeepSpeed. Each function gets the module that was just imported (see hooks.py).

Three touches: which engine class is made, a check while a config is read, and where `zero.Init` puts parameters.
A config without an enabled "lohan" section takes DeepSpeed's own path untouched.
"""
from __future__ import annotations

import functools
import json
import os

from lohan_ds.config import effective_ds_config, parse
from lohan_ds.errors import ConfigError
from lohan_ds.integrations import hooks


def patch_engine(module) -> None:
    """`DeepSpeedEngine(...)` makes a `LohanEngine` when the config says so; class identity stays."""
    engine_class = module.DeepSpeedEngine

    def choose(cls, *args, **kwargs):
        config_class = kwargs.get("config_class")
        given = getattr(config_class, "_param_dict", {})
        if "lohan" in given and parse(given) is not None:
            from lohan_ds.engine import LohanEngine
            LohanEngine.profile_live = staticmethod(_profile_live)
            if cls is engine_class:
                cls = LohanEngine
            elif not issubclass(cls, LohanEngine):
                raise ConfigError(f"lohan does not work with {cls.__name__}: use a plain model, no PipelineModule and "
                                  "no hybrid_engine, or set lohan.enabled to false")
        return object.__new__(cls)

    engine_class.__new__ = choose

    # DeepSpeedEngine.__init__ is only called by Python when __new__ gave an instance of the class that was called;
    # LohanEngine is a subclass, so it is.


def _profile_live(*args):
    from lohan_ds.integrations.live_model import profile_live   # most runs never need it
    return profile_live(*args)


def patch_config(module) -> None:
    """Refuses a contradicting config while it is read, and hides lohan's own keys from DeepSpeed's checks."""
    config_class = module.DeepSpeedConfig
    original = config_class.__init__

    @functools.wraps(original)
    def checked(self, config, *args, **kwargs):
        if isinstance(config, dict) and "lohan" in config:
            hooks.raise_failures()
            parse(config)
        original(self, config, *args, **kwargs)
        if not isinstance(config, dict) and "lohan" in self._param_dict:
            hooks.raise_failures()
            parse(self._param_dict)

    config_class.__init__ = checked


def patch_zero_init(module) -> None:
    """Under `zero.Init` with a lohan config, parameters are made on the host and `F.linear` stays torch's."""
    init_class = module.Init
    original = init_class.__init__

    @functools.wraps(original)
    def on_host(self, *args, **kwargs):
        key = "config_dict_or_path" if kwargs.get("config_dict_or_path") is not None else "config"
        config = _as_dict(kwargs.get(key))
        if config is not None and "lohan" in config and parse(config) is not None:
            kwargs[key] = effective_ds_config(config)
            kwargs["remote_device"] = "cpu"
        original(self, *args, **kwargs)

    init_class.__init__ = on_host


def _as_dict(config) -> dict | None:
    if isinstance(config, dict):
        return config
    if isinstance(config, str) and os.path.isfile(config):
        with open(config) as file:
            return json.load(file)
    return None
