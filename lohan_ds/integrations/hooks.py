"""Post-import hooks: patch a foreign module right after it was imported, whatever the order of imports.

Only the standard library is used here, because this runs inside `import torch` and inside `import deepspeed`. For the
same reason the targets are leaf modules: when torch calls us, `deepspeed` may well be half imported already.
A patch that fails must not break `import deepspeed` for people without a "lohan" section: the error is logged, kept,
and raised when a config with that section is read.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

# module to wait for -> "module:function", called with the module just imported
PATCHES = {
    "deepspeed.runtime.engine": "lohan_ds.integrations.deepspeed:patch_engine",
    "deepspeed.runtime.config": "lohan_ds.integrations.deepspeed:patch_config",
    "deepspeed.runtime.zero.partition_parameters": "lohan_ds.integrations.deepspeed:patch_zero_init",
    "accelerate.utils.deepspeed": "lohan_ds.integrations.huggingface:patch_accelerate",
    "transformers.modeling_utils": "lohan_ds.integrations.huggingface:patch_transformers",
    "transformers.trainer": "lohan_ds.integrations.huggingface:patch_trainer",
}
CONFIG_MODULE = "deepspeed.runtime.config"


def install(patches: Mapping[str, str] = PATCHES) -> None:
    """Patch what is imported, and the rest when it is. Only the first call for a table does something."""
    if any(isinstance(finder, PatchingFinder) and finder.patches == patches for finder in sys.meta_path):
        return
    finder = PatchingFinder(patches)
    sys.meta_path.insert(0, finder)
    finder.patch_imported()


def raise_failures() -> None:
    """Raise the first error that a patch met, if any. Called when a config has a "lohan" section."""
    for finder in sys.meta_path:
        if isinstance(finder, PatchingFinder) and finder.failures:
            name, error = next(iter(finder.failures.items()))
            raise RuntimeError(
                f'this config has a "lohan" section, but lohan_ds could not attach to {name}: {error!r}; '
                "are the versions of lohan_ds, deepspeed and transformers made for each other?"
            ) from error


class PatchingFinder:
    """A meta path finder that lets the others find a module of the table, then patches it once it has run."""

    def __init__(self, patches: Mapping[str, str]):
        self.patches = dict(patches)
        self.failures: dict[str, Exception] = {}  # module name -> what its patch raised
        self._waiting = set(patches)  # modules not patched yet

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        """Called by Python for every import not in `sys.modules`."""
        if self._waiting:
            self.patch_imported()
        if fullname not in self.patches:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader, self.patch)
                return spec
        return None

    def patch_imported(self) -> None:
        """Patch modules that were imported before us. One still half imported (its own `import torch` called us) is
        met again by a later import: of deepspeed at the latest, without which nothing of ours is needed."""
        for name in sorted(self._waiting):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self.patch(module)

    def patch(self, module: ModuleType) -> None:
        """Run the patch of a module that has just been imported."""
        name = module.__name__
        self._waiting.discard(name)
        try:
            home, function = self.patches[name].split(":")
            getattr(importlib.import_module(home), function)(module)
        except Exception as error:
            self.failures[name] = error
            logging.getLogger("lohan_ds").warning("lohan_ds could not attach to %s: %r", name, error)
            if name == CONFIG_MODULE:
                _refuse_lohan_section(module)


class _PatchingLoader:
    """Stands in for a module's loader until the module has run; leaves no trace on it."""

    def __init__(self, loader, after: Callable[[ModuleType], None]):
        self._loader = loader
        self._after = after

    def create_module(self, spec: ModuleSpec):
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str):
        return getattr(self._loader, name)


def _refuse_lohan_section(config_module: ModuleType) -> None:
    """The last guard: with our own patch of the config broken, a "lohan" section must not train without us."""
    original = config_module.DeepSpeedConfig.__init__

    @functools.wraps(original)
    def checked_init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if "lohan" in self._param_dict:
            raise_failures()

    config_module.DeepSpeedConfig.__init__ = checked_init
