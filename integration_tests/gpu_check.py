"""What gpu_check.sh runs: checks that need a GPU, each in a process of its own, and one table of what they found.

A check is a function of this file that returns rows. What it raises is a row that FAILED; `NotRun`, and a check that
the time does not reach any more, are rows that say "not run" and why. `--device cpu` runs the same code on tiny sizes,
so that it is not broken when it meets a GPU; the figures mean nothing then.

The plain run ("torch") has everything on the GPU: bf16 parameters, fp32 masters, fused AdamW. All A/B modes train the
same model on the same batches, one after the other; s/step is the median after two steps of warm-up.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

BUDGET_S = 440.0            # of all checks; the table comes in any case
_MARK = "gpu_check result: "
_GB = 1e9
SIZES = {   # of the A/B model and its batches
    "cuda": {"hidden": 1536, "num_layers": 12, "num_heads": 12, "vocab": 32_000, "batch": 4, "seq": 1024},
    "cpu": {"hidden": 32, "num_layers": 2, "num_heads": 2, "vocab": 128, "batch": 2, "seq": 16},
}
NUM_WARM_UP, NUM_STEPS = 2, 6
LOHAN = {   # mode: the "lohan" section; "ssd_paths" is filled in
    "lohan, host, deferred": {"update": "deferred", "param_tier": "host", "optimizer_tier": "host"},
    "lohan, host, eager": {"update": "eager", "param_tier": "host", "optimizer_tier": "host"},
    "lohan, host, serial": {"update": "serial", "param_tier": "host", "optimizer_tier": "host"},
    "lohan, SSD, deferred": {"update": "deferred", "param_tier": "ssd", "optimizer_tier": "ssd"},
}
DEEPSPEED = {   # mode: "zero_optimization"; "nvme_path" is filled in
    "DeepSpeed ZeRO-3, all on the GPU": {"stage": 3},
    "DeepSpeed ZeRO-3, optimizer on the host": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "DeepSpeed ZeRO-3, all on the host": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                                          "offload_param": {"device": "cpu", "pin_memory": True}},
    "DeepSpeed ZeRO-Infinity, all on the SSD": {"stage": 3, "offload_optimizer": {"device": "nvme"},
                                                "offload_param": {"device": "nvme"}},
}
PLAIN = "torch, all on the GPU"


class Row(NamedTuple):
    check: str
    result: str               # "ok", "FAILED", "not run", or a figure
    note: str = ""


class NotRun(Exception):
    """Why a check has nothing to say here."""


# -- what each process does ---------------------------------------------------------------------------------------


def check_ops(device: str) -> list[Row]:
    """Builds all operators; a fallback's warning is the reason."""
    from lohan_ds.ops import loader
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())
    loader.logger.addHandler(handler)
    rows = []
    for operator in ("cpu_adam", "grad_accumulate", "grad_pack"):
        if operator == "grad_pack" and device == "cpu":
            rows.append(Row("build grad_pack", "not run", "it is for an NVIDIA GPU"))
            continue
        start = time.perf_counter()
        module = loader.native(operator)
        rows.append(Row(f"build {operator}", "FAILED" if module is None else "ok",
                        reasons[-1] if module is None else f"{time.perf_counter() - start:.0f} s"))
    return rows


def check_packing(device: str) -> list[Row]:
    """The operator against its twin, on this device and on the CPU; then its speed."""
    import torch

    from lohan_ds.ops.grad_pack import can_pack, pack, pack_twin
    if not can_pack(torch.device(device)):
        raise NotRun("grad_pack is not built")
    num_cases = 0
    numels = [1, 31, 1025, 16_384, 16_385, 0, 300_001] + [257] * 130   # more than one launch takes
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for scale, bad in ((1.0, None), (0.37, None), (1.0, float("inf")), (0.37, float("nan"))):
            generator = torch.Generator().manual_seed(num_cases)
            grads = [torch.randn(numel + 3, generator=generator).to(dtype)[index % 3:][:numel]
                     for index, numel in enumerate(numels)]
            if bad is not None:
                grads[3][511] = bad
            offsets = [sum(numels[:index]) + index for index in range(len(numels))]
            out, sums = _packed(pack, [g.to(device) for g in grads], offsets, scale, device)
            for where in (device, "cpu"):
                want, want_sums = _packed(pack_twin, [g.to(where) for g in grads], offsets, scale, where)
                if not (_same_bits(out, want) and _same_bits(sums, want_sums)):
                    return [Row("packing, bits", "FAILED", f"{dtype}, scale {scale}, {bad}: not the twin's on {where}")]
            num_cases += 1
    flat = torch.zeros(1 << 26 if device == "cuda" else 1 << 16, dtype=torch.bfloat16, device=device)
    parts = torch.ones_like(flat).split(flat.numel() // 16)
    offsets = [index * parts[0].numel() for index in range(16)]
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        pack(parts, offsets, flat)
    _synchronize(device)
    rate = 10 * 2 * flat.nbytes / (time.perf_counter() - start)
    return [Row("packing, bits", "ok", f"{num_cases} cases, as the twin on {device} and on the CPU"),
            Row("packing, speed", f"{rate / _GB:.0f} GB/s", "read and written, bf16; the link is slower")]


def _packed(packing, grads, offsets, scale: float, device: str):
    import torch
    out = torch.zeros(offsets[-1] + grads[-1].numel(), dtype=grads[0].dtype, device=device)
    sums = packing(grads, offsets, out, scale)
    return out.cpu(), sums.cpu()


def _same_bits(x, y) -> bool:
    """Any nan is the same as another."""
    import torch
    nans = x.isnan()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(nans, y.isnan()) and torch.equal(x[~nans].view(integers), y[~nans].view(integers))


def check_streams(device: str) -> list[Row]:
    """As the test in test_streams.py that needs a GPU."""
    if device == "cpu":
        raise NotRun("they need a GPU")
    import torch

    from lohan_ds.runtime.streams import make_streams
    streams = make_streams(device)
    source = torch.randn(1 << 22).pin_memory()
    result = torch.empty_like(source).pin_memory()
    for _ in range(50):
        there = torch.full(source.shape, float("nan"), device=device)
        torch.cuda._sleep(2_000_000)                     # compute is still busy with its memory
        streams.h2d(there, source, after=streams.compute_mark()).compute_wait()
        doubled = there * 2
        del there
        back = streams.d2h(result, doubled)
        del doubled
        torch.full(source.shape, float("nan"), device=device)   # would take its memory, if it were free
        back.host_wait()
        if not torch.equal(result, source * 2):
            return [Row("copies and waits", "FAILED", "a copy came back with other values")]
    streams.close()
    return [Row("copies and waits", "ok", "50 times there and back, with compute in between")]


def check_links(device: str) -> list[Row]:
    """Pinning at exact size, and what both directions carry, alone and together."""
    import torch

    from lohan_ds.memory.budget import MemoryBudget
    from lohan_ds.memory.pinned_pool import PinnedPool
    from lohan_ds.profiler.links import measure_link
    from lohan_ds.runtime.streams import make_streams
    from lohan_ds.testing.delayed_streams import DelayedStreams
    if device == "cpu":
        streams, copy_bytes = DelayedStreams(0, 0.0), 1 << 16
    else:
        streams, copy_bytes = make_streams(device), 64 << 20
    pool = PinnedPool(MemoryBudget("host", 1 << 30), pin=device == "cuda")
    before = _locked_bytes()
    buffer = pool.alloc(int(1.125 * copy_bytes), "x")
    pinned = f"{buffer.numel()} bytes asked, {pool.budget.used_bytes} mapped, {_locked_bytes() - before} locked"
    is_pinned = buffer.is_pinned() if device == "cuda" else False
    pool.close()
    link = measure_link(streams, torch.device(device), 3.0 if device == "cuda" else 0.1, copy_bytes)
    streams.close()
    pinning = Row("pinning", "ok" if is_pinned else "FAILED", pinned)
    if device == "cpu":
        pinning = Row("pinning", "not run", "nothing to pin for")
    note = ", ".join(f"{name} {rate.per_s / _GB:.1f}" for name, rate in (
        ("h2d", link.h2d), ("d2h", link.d2h), ("h2d beside d2h", link.h2d_with_d2h),
        ("d2h beside h2d", link.d2h_with_h2d)))
    both = link.h2d_with_d2h.per_s + link.d2h_with_h2d.per_s
    return [pinning, Row("link, both ways at once", f"{both / _GB:.1f} GB/s", note)]


def _locked_bytes() -> int:
    """VmPin and VmLck of this process. NVIDIA's driver does not always count what it pins there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmPin:", "VmLck:")))


def check_parity(device: str) -> list[Row]:
    """lohan against the serial twin on the same device: losses, norms, parameters, moments; as many as 75 s allow."""
    deadline = time.monotonic() + 75
    import torch

    from lohan_ds.testing.parity import quick_matrix, run_cases
    torch.use_deterministic_algorithms(True, warn_only=True)
    models = ["odd"]
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401
        models.append("llama tied")
    matrix = quick_matrix(3, models=models, **({} if device == "cuda" else {"tiers": ["host"], "dtypes": ["bf16"]}))
    done, speculated = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for result in run_cases(matrix, [folder], device=device):
            if not result.same:
                return [Row("parity with the twin", "FAILED", f"{result.case}: {result.first_difference}")]
            done += 1
            speculated += result.num_kept
            if time.monotonic() > deadline:
                break
    return [Row("parity with the twin", "ok", f"same bits in {done} of {len(matrix)} cases ({', '.join(models)}; "
                f"tiers, update modes, clipping, accumulation, dtypes); {speculated} updates made in backward stood")]


def run_mode(mode: str, device: str) -> dict[str, Any]:
    """Trains in one mode: {"losses", "step_s", "peak_bytes"} and what else the mode knows."""
    import torch
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        found = _run_plain(device) if mode == PLAIN else _run_engine(mode, device, folder)
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return found


def _model(device: str):
    import torch
    from torch import nn

    from lohan_ds.testing.models import AttentionLayer
    size = SIZES[device]

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(size["vocab"], size["hidden"])
            self.layers = nn.ModuleList(AttentionLayer(size["hidden"], size["num_heads"])
                                        for _ in range(size["num_layers"]))
            self.norm = nn.LayerNorm(size["hidden"])
            self.head = nn.Linear(size["hidden"], size["vocab"], bias=False)

        def forward(self, input_ids, labels):
            x_BTH = self.embed(input_ids)
            for layer in self.layers:
                x_BTH = layer(x_BTH)
            logits_BTV = self.head(self.norm(x_BTH))
            return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    torch.manual_seed(0)
    return Gpt()


def _batches(device: str):
    from lohan_ds.testing.models import lm_batch
    size = SIZES[device]
    for step in range(NUM_WARM_UP + NUM_STEPS):
        batch = lm_batch(size["vocab"], size["batch"], size["seq"], seed=step)
        yield {name: ids.to(device) for name, ids in batch.items()}


def _run_plain(device: str) -> dict[str, Any]:
    import torch
    model = _model(device).to(device, torch.bfloat16)
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=device == "cuda")
    losses, step_s, activation_bytes = [], [], 0
    for batch in _batches(device):
        start = time.perf_counter()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        loss = model(**batch)
        if device == "cuda":
            activation_bytes = max(activation_bytes, torch.cuda.memory_allocated() - before)
        loss.backward()
        for master, param in zip(masters, params):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        for master, param in zip(masters, params):
            param.data.copy_(master)
            master.grad = None
        losses.append(loss.item())
        _synchronize(device)
        step_s.append(time.perf_counter() - start)
    return {"losses": losses, "step_s": step_s[NUM_WARM_UP:], "activation_bytes": activation_bytes}


def _run_engine(mode: str, device: str, folder: str) -> dict[str, Any]:
    from lohan_ds.testing.harness import ds_config, engine_for, init_one_rank
    init_one_rank()
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    if mode in LOHAN:
        section = {**LOHAN[mode], "step_report": True}
        if "ssd" in section.values():
            section["ssd_paths"] = [folder]
        config = ds_config(section, dtype="bf16", optimizer=adam, batch=SIZES[device]["batch"])
    else:
        zero = {name: {**value, "nvme_path": folder} if isinstance(value, dict) and value["device"] == "nvme" else value
                for name, value in DEEPSPEED[mode].items()}
        config = ds_config(None, dtype="bf16", optimizer=adam, batch=SIZES[device]["batch"], zero_optimization=zero)
        if device == "cpu":   # its own Adam takes a minute to build
            adam["params"]["torch_adam"] = True
            config.update(zero_force_ds_cpu_optimizer=False)
    losses, step_s, summaries = [], [], []
    with engine_for(_model(device), config) as engine:
        for batch in _batches(device):
            start = time.perf_counter()
            loss = engine(**batch)
            engine.backward(loss)
            if mode in LOHAN:   # of the step before, whose update trailed into this forward
                summaries.append(engine.lohan_step_summary())
            engine.step()
            losses.append(loss.item())
            _synchronize(device)
            step_s.append(time.perf_counter() - start)
        found = {"losses": losses, "step_s": step_s[NUM_WARM_UP:]}
        if mode in LOHAN:
            found.update(_lohan_facts(engine, summaries[NUM_WARM_UP:]))
    return found


def _lohan_facts(engine, summaries: list) -> dict[str, Any]:
    from lohan_ds.planner.memory_model import needs, total_bytes
    from lohan_ds.run_plan import model_size
    offload = engine.offload
    planned = total_bytes(needs(model_size(offload.model_blocks), offload.plan, offload.streams.unified))
    return {"planned_device_bytes": planned["device"],
            "hidden_share": statistics.median(summary.hidden_seconds_share for summary in summaries),
            "stall_s": statistics.median(sum(summary.stall_s.values()) for summary in summaries),
            "packs": offload.gradients._packer is not None, "pins": offload.pool.pins}


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch
        torch.cuda.synchronize()


# -- the parent ---------------------------------------------------------------------------------------------------

CHECKS = {   # name: the function, its rows if it is not run, the most seconds it may take
    "ops": (check_ops, ["build cpu_adam", "build grad_accumulate", "build grad_pack"], 120),
    "packing": (check_packing, ["packing, bits", "packing, speed"], 60),
    "streams": (check_streams, ["copies and waits"], 40),
    "links": (check_links, ["pinning", "link, both ways at once"], 40),
    "parity": (check_parity, ["parity with the twin"], 130),
}
MODES = (PLAIN, *LOHAN, *DEEPSPEED)
MODE_LIMIT_S = 80


def in_own_process(name: str, device: str, limit_s: float) -> Any:
    """What the check or mode returned. Raises NotRun, and RuntimeError with the last line of what went wrong."""
    if limit_s < 5:
        raise NotRun("no time was left")
    print(f"... {name}", file=sys.stderr, flush=True)
    environment = {**os.environ, "DS_ACCELERATOR": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, os.path.abspath(__file__), "--device", device, "--only", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                               start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)   # the compilers that it has started, too
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NotRun(f"it took longer than {limit_s:.0f} s") from None
        raise
    for line in stdout.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line[len(_MARK):])
            if "not_run" in found:
                raise NotRun(found["not_run"])
            return found["value"]
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), (lines or ["no output"])[-1])
                       + f" (exit code {process.returncode})")


def only(name: str, device: str) -> None:
    """In the process of one check or mode: prints what it found."""
    try:
        value = run_mode(name, device) if name in MODES else CHECKS[name][0](device)
        print(_MARK + json.dumps({"value": value}), flush=True)
    except NotRun as reason:
        print(_MARK + json.dumps({"not_run": str(reason)}), flush=True)


def all_rows(device: str, deadline: float) -> list[Row]:
    rows: list[Row] = []
    for name, (_, row_names, limit_s) in CHECKS.items():
        try:
            rows += [Row(*row) for row in in_own_process(name, device, min(limit_s, deadline - time.monotonic()))]
        except NotRun as reason:
            rows += [Row(row_name, "not run", str(reason)) for row_name in row_names]
        except RuntimeError as error:
            rows += [Row(row_name, "FAILED", str(error)) for row_name in row_names]
    found: dict[str, dict[str, Any]] = {}
    why_not: dict[str, tuple[str, str]] = {}
    for mode in MODES:
        try:
            found[mode] = in_own_process(mode, device, min(MODE_LIMIT_S, deadline - time.monotonic()))
        except NotRun as reason:
            why_not[mode] = ("not run", str(reason))
        except RuntimeError as error:   # DeepSpeed's own failures are no fault of ours
            why_not[mode] = ("not run" if mode in DEEPSPEED else "FAILED", str(error))
    return [*rows, *memory_rows(found), *overlap_rows(found), *loss_rows(found), *ab_rows(found, why_not, device)]


def memory_rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    """The plan does not count activations: those of the plain run are added. The allocator rounds: 10 % more is ok."""
    rows = []
    for mode in LOHAN:
        name = f"device memory: {mode}"
        if mode not in found or PLAIN not in found or found[mode]["peak_bytes"] is None:
            rows.append(Row(name, "not run", "this mode, or the plain run, has no figures"))
            continue
        peak, planned = found[mode]["peak_bytes"], found[mode]["planned_device_bytes"]
        activations = found[PLAIN]["activation_bytes"]
        fits = peak <= 1.1 * (planned + activations)
        rows.append(Row(name, "ok" if fits else "FAILED", f"peak {peak / _GB:.2f} GB; planned {planned / _GB:.2f} and "
                        f"activations {activations / _GB:.2f}; all on the GPU {found[PLAIN]['peak_bytes'] / _GB:.2f}"))
    return rows


def overlap_rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    rows = []
    for mode in LOHAN:
        facts = found.get(mode)
        if facts is None:
            rows.append(Row(f"overlap: {mode}", "not run", "no figures"))
            continue
        rows.append(Row(f"overlap: {mode}", f"{100 * facts['hidden_share']:.0f} %",
                        f"of the update's seconds under compute; {facts['stall_s']:.2f} s a step stalled; "
                        f"gradients {'packed' if facts['packs'] else 'one by one'}, host memory "
                        f"{'pinned' if facts['pins'] else 'not pinned'}"))
    return rows


def loss_rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    losses = {mode: found[mode]["losses"] for mode in LOHAN if mode in found}
    if len(losses) < 2:
        return [Row("same losses in all lohan modes", "not run", "fewer than two have run")]
    same = len({tuple(values) for values in losses.values()}) == 1
    return [Row("same losses in all lohan modes", "ok" if same else "FAILED",
                f"{len(losses)} modes, last loss {sorted({values[-1] for values in losses.values()})}")]


def ab_rows(found: dict[str, dict[str, Any]], why_not: dict[str, tuple[str, str]], device: str) -> list[Row]:
    tokens = SIZES[device]["batch"] * SIZES[device]["seq"]
    rows = []
    for mode in MODES:
        if mode not in found:
            rows.append(Row(f"s/step: {mode}", *why_not[mode]))
            continue
        step_s = statistics.median(found[mode]["step_s"])
        peak = found[mode]["peak_bytes"]
        note = (f"{tokens / step_s:.0f} tokens/s, from {min(found[mode]['step_s']):.3f} to "
                f"{max(found[mode]['step_s']):.3f}")
        rows.append(Row(f"s/step: {mode}", f"{step_s:.3f}", note + (f", peak {peak / _GB:.2f} GB" if peak else "")))
    return rows


def not_run_rows(reason: str) -> list[Row]:
    names = [name for _, row_names, _ in CHECKS.values() for name in row_names]
    names += [f"{what}: {mode}" for what in ("device memory", "overlap") for mode in LOHAN]
    names += ["same losses in all lohan modes", *(f"s/step: {mode}" for mode in MODES)]
    return [Row(name, "not run", reason) for name in names]


def machine_lines() -> list[str]:
    """What the figures are of."""
    lines = [f"python {sys.version.split()[0]}"]
    for package in ("torch", "deepspeed"):
        try:
            lines[0] += f", {package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            lines[0] += f", no {package}"
    try:
        asked = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
        query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        lines.append("GPU, driver, memory, PCIe: " + subprocess.run(query, capture_output=True, text=True, check=True,
                                                                    timeout=20).stdout.strip())
    except (OSError, subprocess.SubprocessError) as error:
        lines.append(f"GPU, driver: nvidia-smi does not tell ({error})")
    soft, hard = ("unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
                  for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    wsl = ", WSL" if "microsoft" in os.uname().release.lower() else ""
    lines.append(f"pinned memory limit (ulimit -l): {soft}, hard {hard}{wsl}; CPUs: {os.cpu_count()}")
    return lines


def why_no_gpu(device: str) -> str | None:
    """None: there is one, and torch can use it."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if device == "cuda" and not torch.cuda.is_available():
        return "there is no NVIDIA GPU that torch can use"
    return None


def table(rows: list[Row]) -> str:
    rows = [Row("check", "result", "note"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{row.check:<{widths[0]}}  {row.result:<{widths[1]}}  {row.note}".rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=(*CHECKS, *MODES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        only(arguments.only, arguments.device)
        return 0
    start = time.monotonic()
    for line in machine_lines():
        print(line, flush=True)
    reason = why_no_gpu(arguments.device)
    rows = not_run_rows(reason) if reason else all_rows(arguments.device, start + BUDGET_S)
    print(f"\n{table(rows)}\n\n{time.monotonic() - start:.0f} s")
    return int(any(row.result == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
