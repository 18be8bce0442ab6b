"""Packing gradients: the GPU's arithmetic, run on the CPU, gives the twin's bits; nvcc compiles it; and it falls back.

The kernel itself needs a GPU: integration_tests/gpu_check.sh.
"""
from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lohan_ds.ops import builders, grad_pack, loader
from lohan_ds.ops.arrays import DTYPES
from lohan_ds.ops.grad_accumulate import SEGMENT_NUMEL, sums_of_squares
from lohan_ds.ops.grad_pack import num_segments, pack, pack_twin

CSRC = Path(builders.__file__).parent / "csrc"
ARCHS = [arch.replace(".", "") for arch in builders.CudaBuilder.INSTALL_ARCHS.split(";")]
NUMELS = [[1], [SEGMENT_NUMEL], [0, 5, 0], [7, SEGMENT_NUMEL + 1, 1023, 1024, 1025, 40, 3 * SEGMENT_NUMEL - 1],
          [100 + i for i in range(128)]]


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """op.h's phases, compiled for the CPU: called as `pack_twin`."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no compiler {compiler}")
    library = tmp_path_factory.mktemp("grad_pack") / "grad_pack_host.so"
    source = CSRC / "tests" / "grad_pack_host.cpp"
    subprocess.run([compiler, *builders.GradPackBuilder().cxx_args(), "-Werror", "-shared", "-fPIC", str(source), "-o",
                    str(library)], check=True)
    function = ctypes.CDLL(str(library)).lohan_pack_on_host

    def call(grads: list[Tensor], offsets: list[int], out: Tensor | None, scale: float) -> Tensor:
        used = [(grad, offset) for grad, offset in zip(grads, offsets) if grad.numel()]
        sums = torch.empty(sum(num_segments(grad.numel()) for grad, _ in used), dtype=torch.float64)
        n = len(used)
        code = function(n, (ctypes.c_void_p * n)(*[grad.data_ptr() for grad, _ in used]),
                        (ctypes.c_int64 * n)(*[grad.numel() for grad, _ in used]),
                        (ctypes.c_int64 * n)(*[offset for _, offset in used]),
                        ctypes.c_void_p(0 if out is None else out.data_ptr()), ctypes.c_void_p(sums.data_ptr()),
                        DTYPES[grads[0].dtype], ctypes.c_float(scale))
        assert code == 0
        return sums

    return call


def gradients(numels: list[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Over many magnitudes, subnormal ones too; each at an address of its own that is a multiple of nothing."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, numel in enumerate(numels):
        values, spread = torch.randn(2, numel, generator=generator)
        values = (values * (4 * spread).exp()).clamp(-6e4, 6e4)
        values[::53] *= 1e-6
        values[::97] = 0
        found.append(torch.empty(numel + 3, dtype=dtype)[index % 3:][:numel].copy_(values))
    return found


def laid_out(numels: list[int], gap: int = 3) -> tuple[list[int], int]:
    """Offsets with gaps in between, and elements in all."""
    offsets, end = [], 1
    for numel in numels:
        offsets.append(end)
        end += numel + gap
    return offsets, end


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("scale", [1.0, 0.37, 1 / 1024, 8.0])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_gpus_arithmetic_has_the_twins_bits(on_host, dtype, scale):
    for numels in NUMELS:
        grads, (offsets, out_numel) = gradients(numels, dtype), laid_out(numels)
        want, got = torch.full((2, out_numel), 7, dtype=dtype)
        want_sums, got_sums = pack_twin(grads, offsets, want, scale), on_host(grads, offsets, got, scale)
        assert torch.equal(bits(got), bits(want)), (numels, (bits(got) != bits(want)).nonzero()[:5])
        assert torch.equal(bits(got_sums), bits(want_sums)), numels
        assert torch.equal(bits(on_host(grads, offsets, None, scale)), bits(want_sums))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sums_are_those_of_the_norm(on_host, dtype):
    """What the CPU would find in the gradients that it holds; also of what was scaled, as it was written."""
    numels = NUMELS[3]
    grads, (offsets, out_numel) = gradients(numels, dtype), laid_out(numels)
    for scale in (1.0, 0.3):
        out = torch.zeros(out_numel, dtype=dtype)
        want = [pack(grads, offsets, out, scale).tolist(), on_host(grads, offsets, out, scale).tolist()]
        held = [part for numel, offset in zip(numels, offsets) for part in sums_of_squares(out[offset:offset + numel])]
        assert want == [held, held]
    assert pack(grads, offsets, None).tolist() == [part for grad in grads for part in sums_of_squares(grad)]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_sum_is_finite_exactly_if_its_segment_is(on_host, dtype, bad):
    """At every place of the order of summation; the largest finite values are."""
    largest = torch.finfo(dtype).max
    for place in (0, 1, 31, 32, 511, 512, 1023, 1024, SEGMENT_NUMEL - 1):
        grad = torch.full((3 * SEGMENT_NUMEL - 5,), largest, dtype=dtype)
        grad[SEGMENT_NUMEL + place] = bad
        out = torch.zeros_like(grad)
        for packing in (on_host, pack_twin):
            assert packing([grad], [0], out, 1.0).isfinite().tolist() == [True, False, True]
            assert torch.equal(bits(out), bits(grad))
    overflowing = torch.full((10,), largest, dtype=dtype)
    for packing in (on_host, pack_twin):
        assert packing([overflowing], [0], None, 4.0).isinf().tolist() == [True]


def test_nothing_beside_a_gradient_is_written(on_host):
    grads = gradients([1000, 2000], torch.bfloat16)
    for packing in (on_host, pack_twin):
        out = torch.full((3100,), 7.0, dtype=torch.bfloat16)
        packing(grads, [3, 1050], out, 1.0)
        assert out[:3].eq(7).all() and out[1003:1050].eq(7).all() and out[3050:].eq(7).all()


def test_what_it_cannot_take():
    grad, out = torch.ones(10), torch.zeros(20)
    for grads, offsets, buffer, message in [
            ([grad.bfloat16()], [0], out, "gradient 0"), ([grad[::2]], [0], out, "contiguous"),
            ([grad.view(2, 5)], [0], out, "gradient 0"), ([grad, grad], [0, 11], out, "gradient 1: 10 elements at 11"),
            ([grad], [0, 1], out, "1 gradients and 2 offsets"), ([grad], [0], out.view(4, 5), "out"),
            ([grad.long()], [0], None, "gradient 0"), ([grad], [-1], out, "at -1"),
            ([grad, grad.half()], [0, 0], None, "gradient 1")]:
        with pytest.raises(ValueError, match=message):
            pack(grads, offsets, buffer)
    assert pack([], [], out).numel() == 0


# -- building -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    """The kernel's object file, for every GPU named: warnings are errors."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is missing: the CUDA operator is not compiled")
    target = tmp_path_factory.mktemp("kernel") / "kernel.o"
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    strict = ["-Werror=all-warnings", "-Xcompiler=-Werror,-fPIC"]
    done = subprocess.run([nvcc, *builders.GradPackBuilder().kernel_args(), *strict, *archs, "-c",
                           str(CSRC / "grad_pack" / "kernel.cu"), "-o", str(target)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


CALL = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("lohan_grad_pack", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    module.pack([1 << 20], [10], [0], 1 << 21, 1 << 22, 0, 1.0, 0)
except RuntimeError as error:
    print("RuntimeError:", error)
"""


def test_nvcc_compiles_it_and_its_module_says_what_cuda_says(kernel, tmp_path):
    """Without a GPU the launch fails: an exception, not a crash."""
    assert ARCHS == ["80", "86", "89", "90"]
    library = tmp_path / f"lohan_grad_pack{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [f"-isystem{torch.__path__[0]}/include", f"-isystem{sysconfig.get_path('include')}"]
    bindings = tmp_path / "bindings.o"
    subprocess.run([os.environ.get("CXX", "c++"), *builders.GradPackBuilder().cxx_args(), "-Werror", "-fPIC", "-O0",
                    "-DTORCH_EXTENSION_NAME=lohan_grad_pack", *headers, "-c",
                    str(CSRC / "grad_pack" / "bindings.cpp"), "-o", str(bindings)], check=True)
    subprocess.run([shutil.which("nvcc"), "-shared", "-cudart=static", str(bindings), str(kernel), "-o", str(library)],
                   check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", CALL, str(library)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("RuntimeError: packing gradients: the kernel was not launched: "), done.stdout


class _Cuda:
    """A torch that says it has a GPU."""

    @staticmethod
    def pretend(monkeypatch, tmp_path, nvcc: str | None, version: str = "13.0") -> None:
        import torch.utils.cpp_extension
        home = tmp_path / "cuda"
        if nvcc is not None:
            (home / "bin").mkdir(parents=True)
            (home / "bin" / "nvcc").write_text(f"#!/bin/sh\n{nvcc}\n")
            (home / "bin" / "nvcc").chmod(0o755)
        monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None if nvcc is None else str(home))
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


@pytest.mark.parametrize(("nvcc", "reason"), [
    (None, "CUDA_HOME does not exist"),
    ("exit 1", "Unable to run"),
    ("echo 'release 12.4, V12.4.1'", "nvcc is of CUDA 12.4, torch of CUDA 13.0"),
    ('[ "$1" = -V ] && echo "release 13.0, V13.0.1" && exit; echo "kernel.cu: error: no such GPU"; exit 1', "error"),
])
def test_without_nvcc_one_line_names_operator_reason_and_cost(monkeypatch, tmp_path, caplog, nvcc, reason):
    _Cuda.pretend(monkeypatch, tmp_path, nvcc)
    loader._load.cache_clear()
    try:
        for _ in range(2):
            assert not grad_pack.can_pack(torch.device("cuda"))
        assert len(caplog.records) == 1
        line = caplog.records[0].getMessage()
        assert "operator grad_pack could not be built" in line and reason in line, line
        assert "one by one" in line and "nvcc" in line
    finally:
        loader._load.cache_clear()


def test_where_torch_has_no_cuda(monkeypatch, caplog):
    loader._load.cache_clear()
    try:
        monkeypatch.setattr(torch.version, "cuda", None)
        assert not grad_pack.can_pack(torch.device("cuda")) and grad_pack.can_pack(torch.device("cpu"))
        assert not grad_pack.can_pack(torch.device("meta"))
        assert len(caplog.records) == 1 and "no NVIDIA GPU" in caplog.records[0].getMessage()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        loader._load.cache_clear()
        assert not grad_pack.can_pack(torch.device("cuda"))
        assert len(caplog.records) == 2 and "built without CUDA" in caplog.records[1].getMessage()
        with pytest.raises(RuntimeError, match="grad_pack cannot be built: this torch is built without CUDA"):
            builders.GradPackBuilder().builder()   # DS_BUILD_LOHAN_GRAD_PACK=1
    finally:
        loader._load.cache_clear()
