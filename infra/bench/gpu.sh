#!/usr/bin/env bash
# Checks and measures the GPU kernels on this machine; writes one JSON file.
#
#   infra/bench/gpu.sh [FILE]      (default: gpu.json; at most 4 minutes)
#
# Needs a CUDA GPU, and torch, triton and transformers as they are; nothing is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
view=$(mktemp -d)
trap 'rm -rf "$view"' EXIT
# The package's name maps to top-level folders; without an installation a view does.
mkdir "$view/criticalkv"
ln -s "$root/kernels" "$view/criticalkv/kernels"
PYTHONPATH="$view" timeout 240 "${PYTHON:-python3}" "$root/infra/bench/gpu.py" "${1:-gpu.json}"
