#!/usr/bin/env bash
# On a machine with one NVIDIA GPU: does this checkout work there, in what memory, how fast? Under 8 minutes, no network.
#
#     bash integration_tests/gpu_check.sh
#
# Needs torch for CUDA, deepspeed and the other dependencies in PYTHON (python3 by default); what else is missing leaves
# its rows of the table at "not run", with the reason. Nothing is installed: a copy of the package is used from a
# temporary folder. Ends with 1 if a row says FAILED, else with 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cp -r lohan_ds "$folder/lohan_ds"
cp -r ops "$folder/lohan_ds/ops"
export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$folder/extensions}"
"${PYTHON:-python3}" integration_tests/gpu_check.py "$@"
