#!/usr/bin/env bash
# Format, lint, types, generated code and the gate against unsafe loaders.
# Architecture and packaging tests run here too: they are fast and guard the layout.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"

step() { printf '\n== %s\n' "$1"; }

step "ruff check"
"$python" -m ruff check .
step "ruff format --check"
"$python" -m ruff format --check .

# Type checkers follow files, not package-dir: show them the tree under its import name.
step "mypy --strict"
rm -rf .check && mkdir -p .check/criticalkv
for part in kernels proto services shared; do
  ln -s "../../$part" ".check/criticalkv/$part"
done
(cd .check && MYPYPATH=. "$python" -m mypy --config-file ../pyproject.toml \
  --cache-dir ../.mypy_cache -p criticalkv)

step "generated stubs are up to date"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
PYTHON="$python" infra/scripts/proto.sh "$fresh"
for stub in "$fresh"/proto/*; do
  diff -u "proto/$(basename "$stub")" "$stub" || {
    echo "error: run infra/scripts/proto.sh and commit the result" >&2
    exit 1
  }
done
echo "ok"

step "gate: no unsafe loaders"
"$python" infra/scripts/gate.py

step "architecture and packaging"
"$python" -m pytest -q tests/infra
