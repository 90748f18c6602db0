"""Refuse code that could run what it reads, and code that could tell what it must not.

- Loaders: pickle and its kin, eval, imports by name, remote code; also by way of an alias,
  of getattr or of the module `builtins`.
- Leaks: log lines, and texts of errors, made from prompts, token ids, keys or passwords.
  A length or a digest of them may be told; what else may is in MAY_BE_TOLD.

Works on the syntax tree, so that comments and strings may speak of these names. Tests are
no part of what runs, and are exempt.
Usage: `python infra/scripts/gate.py [DIRECTORY…]`; exit status 1 with findings.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels", "proto", "services", "shared", "infra")

MODULES = {
    *("pickle", "cPickle", "_pickle", "pickletools", "cloudpickle", "dill", "jsonpickle"),
    *("marshal", "shelve", "joblib", "runpy", "imp", "code", "codeop", "builtins"),
    "multiprocessing",  # its pipes and queues unpickle
}
CALLS = {"eval", "exec", "compile", "__import__", "__builtins__", "import_module"}
# torch.load unpickles even with weights_only (bypassed twice).
ATTRIBUTES = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.serialization.load"),
    *("torch.package.PackageImporter", "numpy.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all"),
    *("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.UnsafeLoader", "yaml.FullLoader"),
    *("importlib.import_module", "logging.config"),
}
METHODS = {
    *("recv_pyobj", "send_pyobj"),  # zmq's pickle
    *("read_pickle", "to_pickle", "exec_module", "load_module", "spec_from_file_location"),
}
KEYWORDS = {"trust_remote_code", "allow_pickle"}

LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"log", "logger", "logging", "_log", "_logger"}
NEVER_TOLD = {
    *("token_ids", "prompt", "messages", "password", "secret", "token", "api_key"),
    *("authorization", "cookie", "redis_url", "redis_reader_url"),
}
NEVER_LOGGED = NEVER_TOLD | {
    *("text", "texts", "tokens", "ids", "message", "content", "question", "answer"),
    *("key", "keys", "body", "data", "payload", "payloads", "stop", "metadata", "url"),
}
MEASURES = {"len", "digest", "sha256", "tokens_digest"}  # what they return may be told
MAY_BE_TOLD = {
    "error.message",  # our own errors' texts pass this gate themselves
    "job.key",  # a digest, see services/gateway/background.py
}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each forbidden construct of one module."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        for what in (*_loaders(node, aliases), *_leaks(node)):
            yield getattr(node, "lineno", 0), what


# ---------------------------------------------------------------- loaders


def _loaders(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if _forbidden(a.name))
    elif isinstance(node, ast.ImportFrom):
        yield from _from_import(node)
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node, aliases)
    elif isinstance(node, ast.Name) and node.id in CALLS:
        yield node.id
    elif isinstance(node, ast.Call):
        yield from _by_name(node, aliases)
    elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
        yield f"{node.arg}="
    elif isinstance(node, ast.Dict):
        keys = {k.value for k in node.keys if isinstance(k, ast.Constant)}
        yield from (f'"{name}":' for name in sorted(KEYWORDS & keys))


def _from_import(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    for alias in node.names:
        whole = f"{module}.{alias.name}"
        if _forbidden(module) or alias.name in MODULES | CALLS or whole in ATTRIBUTES:
            yield f"from {module} import {alias.name}"


def _attribute(node: ast.Attribute, aliases: dict[str, str]) -> Iterator[str]:
    name = _dotted(node, aliases)
    if name in ATTRIBUTES or node.attr in METHODS:
        yield name or f".{node.attr}"


def _by_name(node: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if name in CALLS | METHODS or f"{_dotted(node.args[0], aliases)}.{name}" in ATTRIBUTES:
            yield f"getattr of {name}"


def _forbidden(module: str) -> bool:
    return bool(MODULES & set(module.split("."))) or module in ATTRIBUTES


def _aliases(tree: ast.Module) -> dict[str, str]:
    imports = [a for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    return {"np": "numpy", **{a.asname: a.name for a in imports if a.asname}}


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """The name of a.b.c with its first part resolved; "" for anything else."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, aliases)):
        return f"{owner}.{node.attr}"
    return ""


# ---------------------------------------------------------------- leaks


def _leaks(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    arguments = [*node.args, *(k.value for k in node.keywords if k.arg != "param")]
    if _is_log(node.func):
        told, names = "logged", NEVER_LOGGED
    elif _is_error(node.func):
        told, names = "told in an error", NEVER_TOLD
    else:
        return
    for argument in arguments:
        yield from (f"{name} is {told}" for name in _told(argument, names))


def _is_log(call: ast.expr) -> bool:
    return (
        isinstance(call, ast.Attribute)
        and call.attr in LEVELS
        and _dotted(call.value, {}).rpartition(".")[2] in LOGGERS
    )


def _is_error(call: ast.expr) -> bool:
    return any(part.endswith(("Error", "Exit")) for part in _dotted(call, {}).split("."))


def _told(node: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield the names within an expression whose values would become part of a text."""
    if isinstance(node, ast.Call) and _dotted(node.func, {}).rpartition(".")[2] in MEASURES:
        return
    name = _dotted(node, {})
    if name in MAY_BE_TOLD:
        return
    last = name.rpartition(".")[2]
    if last in names or any(last.endswith(f"_{end}") for end in ("token", "key", "password")):
        yield name
    for child in ast.iter_child_nodes(node):
        yield from _told(child, names)


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
