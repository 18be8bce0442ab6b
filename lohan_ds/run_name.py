"""What the user may call a run."""
from __future__ import annotations

import re


def is_run_name(name: str) -> bool:
    """1 to 64 letters, digits, and ". _ -" inside: safe in a path."""
    return re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", name) is not None
