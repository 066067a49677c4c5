#!/usr/bin/env bash
# The engine on one GPU: correctness, then the table. Needs what requirements.txt installs (with a CUDA build of torch), no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
exec timeout 480 "$python" tests/bench/gpu.py "$@"
