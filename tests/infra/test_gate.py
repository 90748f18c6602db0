"""The gate against unsafe loaders and leaks: green on the tree, red on planted code."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "infra" / "scripts" / "gate.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gate", GATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gate = load()


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
        "import builtins",
        "from builtins import eval",
        "run = getattr(__builtins__, 'eval')",
        "run = getattr(x, 'exec')",
        "import torch as t; t.load('f')",
        "load = getattr(torch, 'load')",
        "torch.jit.load('f')",
        "from torch.serialization import load",
        "importlib.import_module('pick' + 'le')",
        "from importlib import import_module",
        "__import__('pickle')",
        "compile(text, 'f', 'exec')",
        "import shelve",
        "import runpy",
        "from multiprocessing import Pipe",
        "yaml.load_all(text, yaml.UnsafeLoader)",
        "pandas.read_pickle('f')",
        "spec.loader.exec_module(module)",
        "log.info('asked: %s', prompt)",
        "log.info(f'asked: {request.messages}')",
        "log.warning('ids ' + str(token_ids))",
        "self._log.error('bad: %s', body[:100])",
        "logging.debug('key {}'.format(api_key))",
        "log.log(10, 'x', extra={'x': text})",
        "log.exception('call with %s failed', self._store_token)",
        "raise ConfigError(f'cannot log in with {password}')",
        "raise ConfigError(f'cannot reach {config.redis_url}')",
        "raise errors.PolicyError('no: ' + repr(prompt))",
        "raise NodeMissingError.of(node_id, f'has {record.token_ids}')",
    ],
)
def test_a_planted_line_is_found(line: str) -> None:
    assert [number for number, _ in gate.findings(line)][:1] == [1]


def test_a_finding_is_told_and_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import pickle")
    done = run_gate(str(tmp_path))
    assert done.returncode == 1
    assert "bad.py:1: forbidden: import pickle" in done.stdout


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
        "getattr(shape, 'load')",
        "importlib.util.find_spec('flash_attn')",
        "log.info('asked for %d tokens', len(token_ids))",
        "log.info('node %s', tokens_digest(token_ids)[:16])",
        "log.warning('no prompt: %s', error.message)",
        "log.info('%d kept', num_tokens)",
        "raise InvalidRequestError('no such field', param=key)",
        "print(answer.text)",
    ],
)
def test_harmless_code_passes(line: str) -> None:
    assert list(gate.findings(line)) == []
