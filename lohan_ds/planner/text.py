"""Tables, seconds and rates as text."""
from __future__ import annotations

from collections.abc import Sequence

RESOURCES = {"device": "compute", "h2d": "to device", "d2h": "from device", "ssd": "SSD", "cpu": "CPU update",
             "fetch": "fetching"}   # as `ResourceSeconds` names them


def text_table(rows: Sequence[tuple[str, ...]], alignments: str) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(alignments))]
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths)).rstrip()
            for row in rows]


def seconds_text(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.3g} s"


def rate_text(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
