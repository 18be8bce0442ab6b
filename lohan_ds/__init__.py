"""lohan_ds: a "lohan" section in a DeepSpeed JSON makes training out-of-core, with exact numbers.

Importing this package is the explicit way of activation; installed, it is activated by `import torch` as well
(LOHAN_DS_AUTOLOAD=0 switches only that off). Light: neither torch nor deepspeed is imported before a name is used.
"""

from importlib import import_module

from lohan_ds.integrations import hooks

__version__ = "0.1.0"

_HOMES = {
    "LohanConfig": "lohan_ds.config",
    "LohanEngine": "lohan_ds.engine",
    "LohanError": "lohan_ds.errors",
    "ConfigError": "lohan_ds.errors",
    "CapacityError": "lohan_ds.errors",
    "StoreError": "lohan_ds.errors",
    "StepError": "lohan_ds.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    """Import a public name's home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


hooks.install()
