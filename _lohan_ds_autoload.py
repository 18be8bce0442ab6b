"""Called by torch at the end of `import torch` (entry point group "torch.backends").

A module of its own, because the entry point must be able to do nothing: importing anything below `lohan_ds`
already is the explicit way of activation.
"""

import logging
import os


def activate() -> None:
    """Register the import hooks, unless LOHAN_DS_AUTOLOAD says no. Never raises: that would break `import torch`."""
    if os.environ.get("LOHAN_DS_AUTOLOAD", "1").strip().lower() in ("0", "false", "off"):
        return
    try:
        from lohan_ds.integrations import hooks

        hooks.install()
    except Exception:
        logging.getLogger("lohan_ds").warning("lohan_ds is not active", exc_info=True)
