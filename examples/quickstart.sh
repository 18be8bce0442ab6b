#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct with its optimizer state on SSD, starting from nothing but Python and a network for pip.
#   VENV        virtual environment to make or reuse      (.venv-quickstart)
#   PYTHON      interpreter to make it with               (python3)
#   TORCH_SPEC  torch to install if there is none in it   (torch==2.13.0 where no NVIDIA driver is found, else torch)
#   OUT         where model and SSD files go              (outputs/smollm2)
#   DS_CONFIG   DeepSpeed JSON                            (examples/lohan_smollm2.json)
# Further arguments go to finetune_smollm2.py, e.g. --steps 20.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
make_environment "${VENV:-.venv-quickstart}" ".[hf]" gguf

OUT="${OUT:-outputs/smollm2}"
rm -rf "$OUT/model"
mkdir -p "$OUT"
# DeepSpeed's fixed port would meet any other run on this machine.
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
deepspeed --num_gpus 1 --no_local_rank --master_port "$port" --log_level warning examples/finetune_smollm2.py \
    --ds-config "${DS_CONFIG:-examples/lohan_smollm2.json}" --out "$OUT" --ssd "$OUT/ssd" "$@"

echo "Loading $OUT/model in a fresh process, in plain transformers:"
LOHAN_DS_AUTOLOAD=0 python examples/generate.py "$OUT/model"
