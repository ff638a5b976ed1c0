#!/usr/bin/env bash
# Checks on a machine with one NVIDIA GPU what only a GPU can show; some minutes.
#
#   bash scripts/gpu_check.sh [PYTHON]
#
# PYTHON is an interpreter that has Lockstep's dependencies with JAX for CUDA; without it the environment is made by
# scripts/environment.sh with the 'cuda' extra. Shows that our XLA flags are accepted, that the default configuration
# trains on the GPU, and that 10 steps are 5 and 5 bit for bit.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ $# -gt 0 ]]; then
    python=$1
else
    export LOCKSTEP_EXTRAS=cuda
    source "$root/scripts/environment.sh"
    make_environment run
    python=$venv/bin/python
fi
export PYTHONPATH=$root
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

on_gpu=(--set 'mesh.platform="gpu"' --set mesh.nodes=1 --set mesh.devices_per_node=1)
train() { # RUN_DIR OPTIONS …
    "$python" -m trainer train "$root/configs/digits_vit.toml" "${on_gpu[@]}" --run-dir "$work/$1" "${@:2}"
}

"$python" -c 'import jax; print("jax", jax.__version__, jax.devices())'

echo "== the default configuration trains on the GPU"
train whole

echo "== 10 steps are 5 and 5, bit for bit"
short=(--set 'optimizer.schedule="constant"' --set optimizer.warmup_steps=0 --set debug.digest_every=1)
train ten "${short[@]}" --set run.num_steps=10
train parts "${short[@]}" --set run.num_steps=5
train parts "${short[@]}" --set run.num_steps=10 --resume
"$python" - "$work/ten" "$work/parts" <<'PYTHON'
import sys

from trainer import metrics

whole, parts = (metrics.read(f"{path}/metrics.jsonl", "train") for path in sys.argv[1:])
digests = [[row["param_digest"] for row in rows] for rows in (whole, parts)]
assert len(digests[0]) == 10, digests
assert digests[0] == digests[1], digests
print("the same parameters after each of the 10 steps")
PYTHON
echo "gpu_check: passed"
