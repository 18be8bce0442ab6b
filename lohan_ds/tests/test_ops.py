"""Native operators give their twins' bits with any instruction set, cut, address and thread count; and fall back."""
from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor

from lohan_ds.ops import builders, cpu_adam, grad_accumulate, loader
from lohan_ds.ops.arrays import INSTRUCTION_SETS, present_instruction_sets
from lohan_ds.ops.cpu_adam import AdamScalars, AdamStep, update_native_
from lohan_ds.ops.cpu_adam_fused import fused_gives_same_bits, update_fused_
from lohan_ds.ops.cpu_adam_twin import update_twin_
from lohan_ds.ops.grad_accumulate import SEGMENT_NUMEL, accumulate_native_, accumulate_twin_, sums_of_squares_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = [AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 1, 0.3712345678),
         AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, False, 7, 1.0),
         AdamStep(1e-2, 0.5, 0.9, 1e-3, 0.01, True, 3, 0.37),
         AdamStep(3e-5, 0.0, 0.99, 1e-12, 0.1, False, 50, 1.7)]
CSRC = Path(builders.__file__).parent / "csrc"


@pytest.fixture(scope="module")
def adam():
    return _native("cpu_adam")


@pytest.fixture(scope="module")
def accumulate():
    return _native("grad_accumulate")


def _native(operator: str):
    module = loader.native(operator)
    if module is None:
        pytest.skip(f"{operator} does not build here")
    return module


def arrays(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """master, grad, exp_avg, exp_avg_sq over many magnitudes, down to subnormal ones."""
    generator = torch.Generator().manual_seed(seed)
    master, grad, avg, avg_sq, spread, other = torch.randn(6, numel, generator=generator)
    grad = (grad * (4 * spread).exp()).clamp(-6e4, 6e4).to(dtype)
    found = [master * (3 * other).exp(), grad, avg * (6 * other).exp(), (avg_sq * (6 * spread).exp()).square()]
    for array in found:
        array[::97] = 0
    found[1][::89] *= 1e-20
    found[3][::83] = 1e-43
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_bits(got: list[Tensor], want: list[Tensor], what: object = "") -> None:
    for index, (x, y) in enumerate(zip(got, want, strict=True)):
        different = (bits(x) != bits(y)).nonzero().flatten()
        assert not len(different), (what, index, len(different), x[different[:3]], y[different[:3]])


# -- Adam ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", STEPS, ids=["adamw", "l2", "heavy", "no beta1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_in_pieces_of_1_to_130_elements_at_any_address_has_the_twins_bits(adam, at, dtype):
    """D43."""
    scalars = AdamScalars.of(at)
    numel = sum(range(1, 131))
    want = arrays(numel, dtype)
    update_twin_(*want, scalars)
    for instruction_set, out_dtype in itertools.product(present_instruction_sets(adam), DTYPES[1:]):
        got, out = arrays(numel, dtype), torch.empty(numel, dtype=out_dtype)
        start = 0
        for length in range(1, 131):
            piece = slice(start, start + length)
            update_native_(adam, *[array[piece] for array in got], scalars, out[piece], 1, instruction_set)
            start += length
        assert_same_bits([*got, out], [*want, want[0].to(out_dtype)], (instruction_set, out_dtype))


def test_adam_on_one_to_four_threads_has_the_twins_bits(adam):
    numel, scalars = 700_001, AdamScalars.of(STEPS[0])          # six pieces that threads take
    want = arrays(numel, torch.bfloat16)
    update_twin_(*want, scalars)
    for num_threads, instruction_set in itertools.product((1, 2, 3, 4), present_instruction_sets(adam)):
        got, out = arrays(numel, torch.bfloat16), torch.empty(numel, dtype=torch.bfloat16)
        update_native_(adam, *got, scalars, out, num_threads, instruction_set)
        assert_same_bits([*got, out], [*want, want[0].bfloat16()], (num_threads, instruction_set))


def test_adam_by_torchs_fused_kernel_has_the_twins_bits():
    if not fused_gives_same_bits():
        pytest.skip("torch's fused kernel rounds in another way here")
    for at, dtype, numel in itertools.product(STEPS, DTYPES, (1, 31, 32, 1_027, 40_000)):
        want, got = arrays(numel, dtype), arrays(numel, dtype)
        update_twin_(*want, AdamScalars.of(at))
        update_fused_(*got, at)
        assert_same_bits(got, want, (at, dtype, numel))


def test_a_product_and_a_sum_are_rounded_once(adam):
    """1 + 2^-23 + 2^-24 (1 - 2^-36) is just below half way between two fp32; rounded to fp64 first it is half way."""
    small = 2.0 ** -18
    scalars = AdamScalars(coefficient=1.0, decay=1.0, l2=1 - small, avg_weight=0.25, sq_decay=1.0, sq_weight=1.0,
                          sq_correction=1.0, eps=1.0, step_size=0.0)

    def start() -> list[Tensor]:
        return [torch.full((33,), value) for value in (2.0 ** -24 * (1 + small), 1 + 2.0 ** -23, 0.0, 0.0)]

    for sign in (1, -1):
        results = []
        for instruction_set in (None, *present_instruction_sets(adam)):
            master, grad, exp_avg, exp_avg_sq = start()
            state = [master * sign, grad * sign, exp_avg, exp_avg_sq]
            if instruction_set is None:
                update_twin_(*state, scalars)
            else:
                update_native_(adam, *state, scalars, None, 1, instruction_set)
            assert state[2].tolist() == [sign * (1 + 2.0 ** -23) / 4] * 33, instruction_set
            results.append(state)
        for result in results[1:]:
            assert_same_bits(result, results[0])


def test_values_that_are_not_finite_come_through(adam):
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, 3e38, 1e-45])
    combined = [column.contiguous() for column in torch.cartesian_prod(special, special, special, special.abs()).T]
    for at in STEPS:
        want = [array.clone() for array in combined]
        update_twin_(*want, AdamScalars.of(at))
        for instruction_set in present_instruction_sets(adam):
            got, out = [array.clone() for array in combined], torch.empty(len(combined[0]), dtype=torch.bfloat16)
            update_native_(adam, *got, AdamScalars.of(at), out, 1, instruction_set)
            for x, y in zip([*got, out], [*want, want[0].bfloat16()]):
                assert torch.equal(x.isnan(), y.isnan())
                assert_same_bits([x.nan_to_num(7, math.inf, -math.inf)], [y.nan_to_num(7, math.inf, -math.inf)])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sixteen_bits_are_the_nearest_and_nan_stays(adam, dtype):
    """With a step of size 0 `master` goes through; every 16-bit value, half way to the next, and either side of it."""
    ones = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ones = ones[ones.isfinite()]
    half_way = (ones + torch.nextafter(ones.to(dtype), torch.tensor(math.inf, dtype=dtype)).float()) / 2
    patterns = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(2))
    nans = torch.tensor([-1, 0x7F800001, 0x7FFFFFFF, -0x400000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    values = torch.cat([ones, half_way, half_way.nextafter(torch.tensor(math.inf)),
                        half_way.nextafter(torch.tensor(-math.inf)), torch.tensor([65519.99, 65520.0]),
                        patterns.to(torch.int32).view(torch.float32), nans])
    scalars = AdamScalars.of(STEPS[0])._replace(decay=1.0, step_size=0.0)
    for instruction_set in present_instruction_sets(adam):
        zeros = [torch.zeros_like(values) for _ in range(3)]
        out = torch.empty(len(values), dtype=dtype)
        update_native_(adam, values.clone(), *zeros, scalars, out, 1, instruction_set)
        assert torch.equal(out.isnan(), values.isnan())
        number = ~values.isnan()
        assert_same_bits([out[number]], [values[number].to(dtype)], instruction_set)


def test_adam_from_two_threads_at_once_and_after_a_fork(adam):
    numel, scalars = 300_001, AdamScalars.of(STEPS[0])
    wants = [arrays(numel, seed=seed) for seed in range(2)]
    gots = [[array.clone() for array in want] for want in wants]
    for want in wants:
        update_twin_(*want, scalars)
    threads = [threading.Thread(target=update_native_, args=(adam, *got, scalars, None, 3)) for got in gots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(gots, wants):
        assert_same_bits(got, want)
    child = os.fork()
    if child == 0:
        update_native_(adam, *gots[0], scalars, None, 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_adam_refuses_what_it_cannot_take(adam):
    master, grad, exp_avg, exp_avg_sq = arrays(100)
    good = [master, grad, exp_avg, exp_avg_sq, STEPS[0]]
    whole = torch.zeros(150)
    for index, bad in [(1, grad[:99]), (1, grad.double()), (0, master.bfloat16()), (2, torch.zeros(200)[::2]),
                       (3, torch.zeros(100, 1))]:
        with pytest.raises(ValueError, match="needed"):
            cpu_adam.update_(*[*good[:index], bad, *good[index + 1:]])
    with pytest.raises(ValueError, match="exp_avg_sq and exp_avg|exp_avg and exp_avg_sq"):
        cpu_adam.update_(master, grad, whole[:100], whole[50:], STEPS[0])
    with pytest.raises(ValueError, match="overlap by 200 bytes"):
        cpu_adam.update_(*good, out=grad.view(torch.bfloat16)[:100])
    with pytest.raises(ValueError, match="out"):
        cpu_adam.update_(*good, out=torch.empty(100))
    missing = {"avx2", "avx512"} - set(present_instruction_sets(adam))
    for instruction_set in missing:
        with pytest.raises(ValueError, match="lacks"):
            update_native_(adam, *good[:4], AdamScalars.of(STEPS[0]), None, 1, instruction_set)


def test_neighbours_in_one_buffer_are_left_alone(adam):
    """D43: arrays side by side in one allocation, as chunks have them."""
    numel, gap = 1_003, 5
    buffer = torch.full((4 * (numel + gap),), 7.0)
    got = [buffer[i * (numel + gap):][:numel] for i in range(4)]
    want = arrays(numel)
    for array, values in zip(got, want):
        array.copy_(values)
    update_twin_(*want, AdamScalars.of(STEPS[0]))
    update_native_(adam, *got, AdamScalars.of(STEPS[0]), None, 1)
    assert_same_bits(got, want)
    assert all(buffer[i * (numel + gap) + numel:][:gap].eq(7).all() for i in range(4))


@pytest.mark.parametrize("fused", [True, False])
def test_adam_without_the_operator(monkeypatch, fused):
    monkeypatch.setattr(cpu_adam, "native", lambda operator: None)
    monkeypatch.setattr(cpu_adam, "fused_gives_same_bits", lambda: fused and fused_gives_same_bits())
    want, got, out = arrays(5_003, torch.bfloat16), arrays(5_003, torch.bfloat16), torch.empty(5_003).bfloat16()
    update_twin_(*want, AdamScalars.of(STEPS[0]))
    cpu_adam.update_(*got, STEPS[0], out)
    assert_same_bits([*got, out], [*want, want[0].bfloat16()])
    cpu_adam.update_(*[array[:0] for array in got], STEPS[0], out[:0])


# -- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_taken_with_the_twins_bits_and_sums(accumulate, dtype):
    for numel in (0, 1, 7, 1_023, 1_025, SEGMENT_NUMEL, 9 * SEGMENT_NUMEL + 77):
        start, grad = arrays(numel)[0], arrays(numel, dtype)[1]
        for add, target_dtype in [(True, torch.float32), (False, torch.float32), (False, dtype)]:
            want = start.to(target_dtype, copy=True)
            want_sums = accumulate_twin_(want, grad, add, True)
            for num_threads, instruction_set in itertools.product((1, 3), present_instruction_sets(accumulate)):
                got = torch.empty(numel + 3, dtype=target_dtype)[3:].copy_(start)
                sums = accumulate_native_(accumulate, got, grad, add, True, num_threads, instruction_set)
                assert_same_bits([got], [want], (numel, add, target_dtype, instruction_set))
                assert sums == want_sums
                assert accumulate_native_(accumulate, got, grad, add, False, num_threads, instruction_set) is None
        sums = accumulate_native_(accumulate, None, grad, False, True, 2)
        assert sums == sums_of_squares_twin(grad)
        assert math.fsum(sums) == pytest.approx(math.fsum(grad.double().square().tolist()), rel=1e-14)


def test_a_sum_says_whether_its_segment_is_finite(accumulate):
    grad = torch.full((3 * SEGMENT_NUMEL,), 3.4e38)
    for bad in (math.inf, -math.inf, math.nan):
        target = torch.zeros_like(grad)
        grad[SEGMENT_NUMEL + 5] = bad
        sums = grad_accumulate.accumulate_(target, grad, add=True)
        assert [math.isfinite(value) for value in sums] == [True, False, True]
        assert str(sums) == str(sums_of_squares_twin(target))
    target.fill_(3e38)
    assert not math.isfinite(grad_accumulate.accumulate_(target, target.clone(), add=True)[0])


def test_gradients_refuse_what_they_cannot_take():
    grad = torch.ones(10, dtype=torch.bfloat16)
    for target, add in [(torch.ones(9), False), (torch.ones(10).half(), False), (torch.ones(10).bfloat16(), True)]:
        with pytest.raises(ValueError, match="target"):
            grad_accumulate.accumulate_(target, grad, add)
    with pytest.raises(ValueError, match="overlap"):
        grad_accumulate.accumulate_(grad[:6], grad[4:], add=False)


def test_gradients_without_the_operator(monkeypatch):
    monkeypatch.setattr(grad_accumulate, "native", lambda operator: None)
    target, grad = torch.ones(20_000), torch.full((20_000,), 2.0).bfloat16()
    assert grad_accumulate.accumulate_(target, grad, add=True) == [9.0 * SEGMENT_NUMEL, 9.0 * (20_000 - SEGMENT_NUMEL)]
    assert grad_accumulate.accumulate_(target, grad, add=False, sums=False) is None
    assert grad_accumulate.sums_of_squares(target) == [4.0 * SEGMENT_NUMEL, 4.0 * (20_000 - SEGMENT_NUMEL)]


# -- SSD I/O --------------------------------------------------------------------------------------------------------


def test_checksums_are_those_of_the_package():
    module = _native("ssd_io")
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    lengths = [*range(0, 1_300), *range(2_040, 2_060), 4_096, 65_535, 70_000]
    for instruction_set, numel in itertools.product(present_instruction_sets(module), lengths):
        part = data[-numel:] if numel else data[:0]
        got = module.checksum(part.data_ptr(), numel, INSTRUCTION_SETS[instruction_set])
        assert got == xxhash.xxh3_64_intdigest(part.numpy().tobytes()), (instruction_set, numel)


# -- building -----------------------------------------------------------------------------------------------------

FALL_BACK = """
import os, sys
import torch
from lohan_ds.ops import loader
from lohan_ds.ops.cpu_adam import AdamStep, update_
cases = {"compiler fails": {"CXX": "/bin/false"}, "no such compiler": {"CXX": "no-such-c++"},
         "no compiler, no ninja": {"PATH": "/nowhere"}, "no place": {"TORCH_EXTENSIONS_DIR": "/dev/null/x"},
         "off": {"LOHAN_DS_NATIVE_OPS": "0"}}
for name, variables in cases.items():
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    loader._load.cache_clear()
    print(f"case: {name}", file=sys.stderr, flush=True)
    state = list(torch.ones(4, 100))
    update_(*state, AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 1, 1.0))
    update_(*state, AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 2, 1.0))
    assert state[0][0] < 1
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})
"""


def test_what_cannot_be_built_is_one_last_line_that_names_operator_and_reason(tmp_path):
    """D01, D05."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    environment.pop("LOHAN_DS_NATIVE_OPS", None)
    done = subprocess.run([sys.executable, "-c", FALL_BACK], env=environment, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    said = {case.splitlines()[0]: case.splitlines()[1:] for case in done.stderr.split("case: ")[1:]}
    reasons = {"compiler fails": "/bin/false", "no such compiler": "no compiler no-such-c++ on the PATH",
               "no compiler, no ninja": "no compiler", "no place": "/dev/null/x"}
    for case, reason in reasons.items():
        assert "operator cpu_adam could not be built" in said[case][-1] and reason in said[case][-1], said[case]
        assert len([line for line in said[case] if "could not be built" in line]) == 1
    assert said["off"] == []


BUILD = """
from lohan_ds.ops.builders import LohanOpBuilder
from lohan_ds.ops.loader import native
flags = LohanOpBuilder.cxx_args
LohanOpBuilder.cxx_args = lambda builder: [*flags(builder), "-Werror"]
print(native("grad_accumulate").__file__)
"""


def test_builds_beside_a_killed_builds_lock_and_never_asks_nvcc(accumulate, tmp_path):
    """D02. The file is what torch would wait for without end. Warnings are errors."""
    cache, asked = tmp_path / "cache", tmp_path / "asked"
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\ntouch {asked}\necho 'release 1.0, V1.0'\n")
    nvcc.chmod(0o755)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(cache), "CUDA_HOME": str(tmp_path / "cuda")}
    (cache / "lohan_grad_accumulate").mkdir(parents=True)
    (cache / "lohan_grad_accumulate" / "lock").touch()
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("lohan_grad_accumulate.so")
    assert not asked.exists()
    assert not (cache / "lohan_grad_accumulate" / "lock").exists()


def test_a_lock_that_is_held_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(builders, "_LOCK_TIMEOUT_S", 0.1)
    with builders._exclusive(tmp_path / "lohan.lock"):
        with pytest.raises(TimeoutError, match="lohan.lock"):
            with builders._exclusive(tmp_path / "lohan.lock"):
                pass
    with builders._exclusive(tmp_path / "lohan.lock"):
        pass


@pytest.mark.parametrize("operator", ["cpu_adam", "ssd_io"])
def test_no_warnings(adam, operator):
    builder = builders.BUILDERS[operator]()
    headers = [f"-isystem{torch.__path__[0]}/include", f"-isystem{sysconfig.get_path('include')}"]
    command = [os.environ.get("CXX", "c++"), *builder.cxx_args(), "-Werror", "-fsyntax-only", *headers]
    sources = [builder.deepspeed_src_path(source) for source in builder.sources()]
    done = subprocess.run([*command, "-DTORCH_EXTENSION_NAME=x", *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", ["ops_test.cpp", "ssd_io_test.cpp"])
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_under_sanitizers(adam, tmp_path, sanitizers, source):
    program = tmp_path / "ops_test"
    compiler = [os.environ.get("CXX", "c++"), f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    if subprocess.run([*compiler, str(probe), "-o", str(program)], capture_output=True).returncode:
        pytest.skip(f"the compiler lacks -fsanitize={sanitizers}")
    flags = [flag for flag in builders.CpuAdamBuilder().cxx_args() if flag != "-O3"] + ["-O1", "-g1", "-Werror"]
    subprocess.run([*compiler, *flags, str(CSRC / "tests" / source), "-o", str(program)], check=True)
    done = subprocess.run([str(program), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
