"""The wheel holds exactly the tree's modules, and names itself rightly."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("kernels", "proto", "services", "shared")
BUILD = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: setuptools would ship what an earlier build/ holds, and leave its own.
    tree = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=tree, check=True, capture_output=True
    )
    return next(out.glob("*.whl"))


def test_the_wheel_is_the_tree(wheel: Path) -> None:
    kinds = {".py", ".proto", ".pyi"}
    expected = {
        f"criticalkv/{path.relative_to(ROOT)}"
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.suffix in kinds and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_its_metadata(wheel: Path, pyproject: dict[str, Any]) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    info = next(name for name in names if name.endswith(".dist-info/METADATA"))
    text = archive.read(info).decode()
    assert f"Version: {pyproject['project']['version']}" in text
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "criticalkv = criticalkv.services.cli:main" in entry


def test_the_installed_version_is_the_trees(pyproject: dict[str, Any]) -> None:
    assert metadata.version("criticalkv") == pyproject["project"]["version"]


def test_every_dependency_has_a_lower_bound(pyproject: dict[str, Any]) -> None:
    for requirement in pyproject["project"]["dependencies"]:
        assert ">=" in requirement or "==" in requirement, requirement


def test_the_stubs_generator_is_not_newer_than_the_oldest_runtime(
    pyproject: dict[str, Any],
) -> None:
    pins = {
        name.partition(separator)[0]: name.partition(separator)[2]
        for separator, names in (
            (">=", pyproject["project"]["dependencies"]),
            ("==", pyproject["project"]["optional-dependencies"]["dev"]),
        )
        for name in names
        if separator in name
    }
    oldest, generator = pins["grpcio"].split("."), pins["grpcio-tools"].split(".")
    assert generator[:2] <= oldest[:2]


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["store", "--help"]])
def test_the_command_starts(arguments: list[str], tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("criticalkv")
    done = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("criticalkv")
    done = subprocess.run(
        [command, "serve", "--port", "0"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [done.stderr.strip()]
    assert "gateway.port" in done.stderr
