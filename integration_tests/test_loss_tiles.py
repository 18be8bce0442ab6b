"""Head and loss in tiles inside engines: the same bits as the twin that tiles alike, and nobody's script changes."""
from __future__ import annotations

from lohan_ds.testing.parity import Case, run_cases

CASES = [
    Case("llama tied", "ssd", "serial", "always", 3, "fp32", 3, 8, "recompute"),
    Case("llama tied", "ssd", "deferred", "always", 3, "fp32", 3, 8, "host"),
    Case("llama tied", "ssd", "eager", "never", 1, "bf16", 4, 5, "keep"),
    Case("llama untied", "ssd", "deferred", "alternating", 3, "bf16", 4, 7, "ssd"),
    Case("llama untied", "ssd", "eager", "alternating", 3, "bf16", 4, 7, "recompute"),
    Case("llama untied", "mixed", "serial", "off", 1, "fp32", 3, 512, "keep"),
    Case("gpt2", "ssd", "eager", "last", 3, "fp32", 4, 11, "recompute"),
    Case("gpt2", "ssd", "serial", "off", 1, "bf16", 3, 1, "host"),
    Case("gpt2", "host", "deferred", "always", 1, "fp32", 3, 11, "keep"),
]


def test_tiled_runs_equal_the_twin_that_tiles_alike(tmp_path):
    results = list(run_cases(CASES, [str(tmp_path)]))
    wrong = [f"{result.case}: {result.first_difference}" for result in results if not result.same]
    assert len(results) == len(CASES) and not wrong, "\n".join(wrong)
