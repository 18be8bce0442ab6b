#!/usr/bin/env bash
# Sets up an environment and runs every test; VENV, PYTHON, TORCH_SPEC as in examples/quickstart.sh.
# Further arguments go to pytest, e.g. -k hooks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
make_environment "${VENV:-.venv-test}" -e ".[hf,test]"

ruff check .

# The wheel is what users get: it must hold every package and the entry points, and be importable outside this folder.
wheels="$(mktemp -d)"
trap 'rm -rf "$wheels"' EXIT
python -m pip wheel --quiet --no-deps --wheel-dir "$wheels" .
rm -rf build
python -m pip install --quiet --no-deps --target "$wheels/site" "$wheels"/lohan_ds-*.whl
(
    cd "$wheels"
    PYTHONPATH="$wheels/site" python - "$wheels" <<'PY'
import sys
from importlib.metadata import distributions
from pathlib import Path

import lohan_ds.cli
import lohan_ds.ops
import lohan_ds.store

assert lohan_ds.ops.__file__.startswith(sys.argv[1]) and lohan_ds.__file__.startswith(sys.argv[1]), lohan_ds.__file__
assert (Path(lohan_ds.ops.__file__).parent / "csrc/cpu_adam/loop.h").exists()
assert (Path(lohan_ds.ops.__file__).parent / "csrc/grad_pack/kernel.cu").exists()
assert (Path(lohan_ds.__file__).parent / "planner/machines/rtx4090-128gb-2ssd.json").exists()
(wheel,) = distributions(name="lohan_ds", path=[sys.argv[1] + "/site"])
assert {entry.group for entry in wheel.entry_points} == {"torch.backends", "console_scripts"}
PY
)

# Operators are compiled for this environment alone: a build that was killed elsewhere leaves a lock without an owner.
# DeepSpeed's own, which takes a minute and blocks every process that wants it, comes ahead of all tests.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$VIRTUAL_ENV/torch_extensions}"
rm -f "$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm/lock"
python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"

python -m pytest -q -rs --durations=10 lohan_ds/tests integration_tests "$@"
