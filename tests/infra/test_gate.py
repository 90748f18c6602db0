"""The gate against unsafe loaders: green on the tree, red on planted code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "infra" / "scripts" / "gate.py"


def run_gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(GATE), *arguments], capture_output=True, text=True)


def test_the_tree_is_clean() -> None:
    done = run_gate()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import ray.cloudpickle as cp",
        "from ray import cloudpickle",
        "from pickle import loads",
        "import marshal",
        "x = torch.load('f', weights_only=True)",
        "from torch import load",
        "load(path, trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "np.load('f')",
        "x = eval('1')",
        "exec(code)",
        "run = eval",
        "yaml.load(text)",
        "socket.recv_pyobj()",
    ],
)
def test_a_planted_line_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.py").write_text(line)
    done = run_gate(str(tmp_path))
    assert done.returncode == 1
    assert "bad.py:1: forbidden" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "# no pickle, no eval",
        "model.eval()",
        "text = 'torch.load'",
        "yaml.safe_load(text)",
        "safetensors.torch.load_file(p)",
        "re.compile('x')",
        "asyncio.create_subprocess_exec('ls')",
    ],
)
def test_harmless_code_passes(tmp_path: Path, line: str) -> None:
    (tmp_path / "good.py").write_text(line)
    assert run_gate(str(tmp_path)).returncode == 0
