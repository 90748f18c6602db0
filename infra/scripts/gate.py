"""Refuse code that could run what it reads: pickle and its kin, eval, remote code.

Works on the syntax tree, so that comments and strings may speak of these names.
Usage: `python infra/scripts/gate.py [DIRECTORY…]`; exit status 1 with findings.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels", "proto", "services", "shared", "infra")

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "__import__"}
# torch.load unpickles even with weights_only (bypassed twice); recv_pyobj is zmq's pickle.
ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("numpy", "load")}
METHODS = {"recv_pyobj", "send_pyobj"}
KEYWORDS = {"trust_remote_code", "allow_pickle"}
ALIASES = {"np": "numpy"}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each forbidden construct of one module."""
    for node in ast.walk(ast.parse(source)):
        for what in _of(node):
            yield getattr(node, "lineno", 0), what


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if _forbidden(a.name))
    elif isinstance(node, ast.ImportFrom):
        yield from _from_import(node)
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node)
    elif isinstance(node, ast.Name) and node.id in CALLS:
        yield node.id
    elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
        yield f"{node.arg}="
    elif isinstance(node, ast.Dict):
        keys = {k.value for k in node.keys if isinstance(k, ast.Constant)}
        yield from (f'"{name}":' for name in sorted(KEYWORDS & keys))


def _from_import(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    for alias in node.names:
        if _forbidden(module) or alias.name in MODULES or (module, alias.name) in ATTRIBUTES:
            yield f"from {module} import {alias.name}"


def _attribute(node: ast.Attribute) -> Iterator[str]:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if (ALIASES.get(owner, owner), node.attr) in ATTRIBUTES:
        yield f"{owner}.{node.attr}"
    elif node.attr in METHODS or (owner == "builtins" and node.attr in CALLS):
        yield f".{node.attr}"


def _forbidden(module: str) -> bool:
    return bool(MODULES & set(module.split(".")))


def main(directories: list[str]) -> int:
    """Print every finding under the directories; return the exit status."""
    bad = 0
    for directory in directories or [str(ROOT / part) for part in SOURCES]:
        for path in sorted(Path(directory).rglob("*.py")):
            for line, what in findings(path.read_text()):
                print(f"{path}:{line}: forbidden: {what}")
                bad += 1
    print("ok" if not bad else f"{bad} forbidden constructs")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
