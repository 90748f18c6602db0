"""The import rule: services → shared → {kernels, proto}, and services never meet."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("kernels", "proto", "services", "shared")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "proto": {"proto"},
    "shared": {"shared", "kernels", "proto"},
    "services": {"services", "shared", "kernels", "proto"},
}
# Files directly in services/ compose the parts (cli, app, cluster, demo) and may import
# all of them; what they offer in return may be imported by nobody below.
SERVICE_MAY_IMPORT = {
    "local": {"local", "prefill", "decode"},
    "evaluation": {"evaluation", "local"},
    # Benchmarks time the engines and the store themselves, side by side with others.
    "bench": {"analysis", "bench", "decode", "evaluation", "local", "prefill", "store"},
    # What a policy kept is looked at in one process, and reported as benchmarks are.
    "analysis": {"analysis", "bench", "evaluation", "local"},
    # Chaos starts and kills the store and its Valkey, and reports as benchmarks do.
    "chaos": {"bench", "chaos", "evaluation", "store"},
}


def sources() -> list[Path]:
    return sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


def imports(source: str, package: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: -node.level + 1 or None]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(relative: Path, source: str) -> list[str]:
    """Return the imports of one file that break the rule."""
    package = ".".join(("criticalkv", *relative.parent.parts))
    found = []
    for name in imports(source, package):
        top, _, rest = name.partition(".")
        if (top == "criticalkv" and not _allowed(relative.parts, rest.split("."))) or top in PARTS:
            found.append(name)
    return found


def _allowed(importer: tuple[str, ...], imported: list[str]) -> bool:
    if imported[0] not in MAY_IMPORT[importer[0]]:
        return False
    in_a_service = importer[0] == "services" and len(importer) > 2
    if not in_a_service or imported[0] != "services":
        return True
    service = importer[1]
    return imported[1] in SERVICE_MAY_IMPORT.get(service, {service})


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert violations(path.relative_to(ROOT), path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/ops.py", "import criticalkv.shared.config"),
        ("kernels/ops.py", "from criticalkv.proto import cache_store_pb2"),
        ("shared/config.py", "from criticalkv.services import cli"),
        ("services/gateway/core.py", "from criticalkv.services.decode.engine import DecodeEngine"),
        ("services/gateway/core.py", "from ..decode import engine"),
        ("services/store/get.py", "def f():\n    import criticalkv.services.prefill.engine"),
        ("services/decode/engine.py", "from criticalkv.services import cli"),
        ("shared/config.py", "from kernels import ops"),
    ],
)
def test_a_planted_import_is_found(file: str, line: str) -> None:
    assert len(violations(Path(file), line)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/ops.py", "from criticalkv.kernels import reference"),
        ("services/local/engine.py", "from criticalkv.services.prefill.engine import Engine"),
        ("services/cli.py", "from criticalkv.services.store import server"),
        ("services/store/get.py", "from criticalkv.services.store.keys import key"),
        ("services/store/get.py", "from . import keys"),
    ],
)
def test_a_right_import_is_not(file: str, line: str) -> None:
    assert violations(Path(file), line) == []


@pytest.mark.parametrize("part", PARTS)
def test_no_init_directly_in_a_part(part: str) -> None:
    # transformers imports a package named `kernels`; ours must not shadow it.
    assert not (ROOT / part / "__init__.py").exists()


def test_packages_on_disk_are_the_packages_listed() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(pyproject["tool"]["setuptools"]["packages"])
    on_disk = {".".join(("criticalkv", *p.relative_to(ROOT).parent.parts)) for p in sources()}
    assert listed == on_disk
    nested = {name for name in listed if name.count(".") > 1}
    for name in nested:
        assert (ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").exists(), name


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("criticalkv.services.store.server", ("torch", "transformers", "ray")),
        ("criticalkv.services.cli", ("torch", "transformers", "ray")),
        ("criticalkv.services.cluster", ("torch", "ray")),
        ("criticalkv.shared.config", ("torch", "ray", "grpc")),
    ],
)
def test_heavy_imports_stay_away(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "[]"
