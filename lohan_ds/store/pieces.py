"""How a long request is cut: the unit of I/O on the threads, and of the checksums."""
from __future__ import annotations

from collections.abc import Callable

PIECE_BYTES = 8 << 20
OnPiece = Callable[[int, memoryview], None]   # number of the piece within the request, its bytes
