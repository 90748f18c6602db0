#!/usr/bin/env bash
# Generate the committed gRPC stubs. The generator is the oldest supported one
# (the pin in pyproject.toml's dev extra): stubs refuse a runtime older than it.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-.}"
mkdir -p "$out/proto"
python="${PYTHON:-python3}"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m grpc_tools.protoc -Icriticalkv/proto=proto \
  --python_out="$tmp" --pyi_out="$tmp" --grpc_python_out="$tmp" \
  proto/cache_store.proto
cp "$tmp"/criticalkv/proto/cache_store_pb2*.py* "$out/proto/"
