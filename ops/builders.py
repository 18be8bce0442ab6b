"""Builders of the native operators, by DeepSpeed's op builder: `load()` compiles at first use and caches the result.

    LohanOpBuilder.load()          the module: built at installation, else compiled now into TORCH_EXTENSIONS_DIR
    DS_BUILD_LOHAN_CPU_ADAM=1      while installing: build that operator then (setup.py)

An operator needs Python's and pybind11's headers but nothing of torch: it compiles in seconds and stays valid when
torch is upgraded. Those for the CPU are one C++ file and never ask nvcc; a `CudaBuilder` has a kernel besides.

[Note: a lock that ends with its owner]
torch marks a build under way by a file, `lock`, and waits without end while it exists: one `kill -9` during a build,
and every later run hangs. So a builder takes a lock of the kernel's first, which dies with the process that holds it.
Who has that one knows that nobody builds, and removes what a killed process left.
"""
from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from deepspeed.ops.op_builder.builder import (CUDAOpBuilder, MissingCUDAException, OpBuilder,
                                                  installed_cuda_version)

_FOLDER = Path(__file__).resolve().parent
_LOCK_TIMEOUT_S = 120.0     # another process's build takes seconds


class LohanOpBuilder(OpBuilder):
    """One operator. Subclasses name it; its source is csrc/<OPERATOR>/bindings.cpp. Raises what the build raises."""
    OPERATOR: str               # e.g. "cpu_adam"
    BUILD_VAR: str              # environment variable that asks for a build at installation

    def __init__(self) -> None:
        super().__init__(name=f"lohan_{self.OPERATOR}")

    def absolute_name(self) -> str:
        return f"lohan_ds.ops.{self.name}_op"

    def sources(self) -> list[str]:
        return [f"csrc/{self.OPERATOR}/bindings.cpp"]

    def deepspeed_src_path(self, code_path: str) -> str:
        return str(_FOLDER / code_path)

    def builder(self):
        """The setuptools.Extension for setup.py, which wants paths from its own folder."""
        extension = super().builder()
        extension.sources = [os.path.relpath(_FOLDER / source) for source in self.sources()]
        return extension

    def cxx_args(self) -> list[str]:
        """Nothing here depends on this machine. See [Note: the same bits on every instruction set] in isa.h."""
        return ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
                "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]

    def extra_ldflags(self) -> list[str]:
        return ["-pthread"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Without the compiler torch would fill a screen before it fails."""
        compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
        if sys.platform not in ("linux", "darwin"):
            self.error_log = f"it is for Linux and macOS, this is {sys.platform}"
        elif shutil.which(compiler) is None:
            self.error_log = f"there is no compiler {compiler} on the PATH"
        return self.error_log is None

    def load(self, verbose: bool = False) -> ModuleType:
        if self.name not in self._loaded_ops:
            if importlib.util.find_spec(self.absolute_name()) is not None:
                self._loaded_ops[self.name] = importlib.import_module(self.absolute_name())
            else:
                self.jit_load(verbose)
        return self._loaded_ops[self.name]

    def jit_load(self, verbose: bool = False) -> ModuleType:
        if not self.is_compatible(verbose):
            raise RuntimeError(self.error_log)
        from torch.utils import cpp_extension   # takes most of a second
        folder = Path(cpp_extension._get_build_directory(self.name, verbose))
        with _exclusive(folder / "lohan.lock"), _ninja_on_path():
            (folder / "lock").unlink(missing_ok=True)
            return super().jit_load(verbose)


class CpuAdamBuilder(LohanOpBuilder):
    OPERATOR = "cpu_adam"
    BUILD_VAR = "DS_BUILD_LOHAN_CPU_ADAM"


class GradAccumulateBuilder(LohanOpBuilder):
    OPERATOR = "grad_accumulate"
    BUILD_VAR = "DS_BUILD_LOHAN_GRAD_ACCUMULATE"


class CudaBuilder(LohanOpBuilder, CUDAOpBuilder):
    """An operator for an NVIDIA GPU, with csrc/<OPERATOR>/kernel.cu besides. At first use compiled for the GPUs that
    are there; TORCH_CUDA_ARCH_LIST names others."""
    INSTALL_ARCHS = "8.0;8.6;8.9;9.0"   # compiled for at installation, unless TORCH_CUDA_ARCH_LIST says otherwise

    def sources(self) -> list[str]:
        return [*super().sources(), f"csrc/{self.OPERATOR}/kernel.cu"]

    def builder(self):
        self.error_log = self._why_no_nvcc()   # DeepSpeed's would compile the kernel without it
        if self.error_log is not None:
            raise RuntimeError(f"{self.name} cannot be built: {self.error_log}")
        return super().builder()

    def kernel_args(self) -> list[str]:
        """Of nvcc, for any GPU: no fused or approximate arithmetic."""
        return ["-O3", "-std=c++17", "-fmad=false", "-Xcompiler=-Wall,-Wextra"]

    def nvcc_args(self) -> list[str]:
        return [*self.kernel_args(),
                *self.compute_capability_args(None if self.jit_mode else self.INSTALL_ARCHS)]

    def is_compatible(self, verbose: bool = False) -> bool:
        self.error_log = "torch finds no NVIDIA GPU" if not torch.cuda.is_available() else self._why_no_nvcc()
        return self.error_log is None and super().is_compatible(verbose)

    @staticmethod
    def _why_no_nvcc() -> str | None:
        """None: there is one that fits torch."""
        if torch.version.cuda is None:
            return "this torch is built without CUDA"
        try:
            major, minor = installed_cuda_version()
        except MissingCUDAException as error:
            return str(error)
        if str(major) != torch.version.cuda.split(".")[0]:
            return f"nvcc is of CUDA {major}.{minor}, torch of CUDA {torch.version.cuda}"
        return None


class GradPackBuilder(CudaBuilder):
    OPERATOR = "grad_pack"
    BUILD_VAR = "DS_BUILD_LOHAN_GRAD_PACK"


BUILDERS = {builder.OPERATOR: builder for builder in (CpuAdamBuilder, GradAccumulateBuilder, GradPackBuilder)}


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds the lock of [Note: a lock that ends with its owner]; TimeoutError if another process does not let go."""
    import fcntl   # not on Windows
    with open(path, "w") as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.05)
        yield


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """pip puts ninja beside the interpreter, which is on PATH only in an activated environment."""
    before, scripts = os.environ.get("PATH", ""), sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is not None:
        os.environ["PATH"] = f"{before}{os.pathsep}{scripts}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
