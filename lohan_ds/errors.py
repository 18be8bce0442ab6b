"""Every exception the package raises on purpose, one class per kind of cause.

What a user can fix in the JSON is a `ConfigError`, what does not fit is a `CapacityError`, what a disk did
wrong is a `StoreError`. Our own bugs are plain `AssertionError`s. Messages say what failed, where, which
numbers were got and needed, and what to do next.
"""


class LohanError(Exception):
    """Base of all lohan_ds errors."""


class ConfigError(LohanError, ValueError):
    """A setting that the user can correct; the message names the JSON key."""


class CapacityError(LohanError, MemoryError):
    """The plan does not fit a tier; the message holds the table of needed against available bytes."""


class StoreError(LohanError, OSError):
    """A read or write of the block store failed; the message names path, offset, got and needed bytes."""


class StepError(LohanError, RuntimeError):
    """Background work of an earlier call failed, or a call came at a moment when it cannot be exact."""
