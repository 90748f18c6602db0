"""Answer examples through the public library kvpress' own pipeline, one request per line.

Needs the environment described in `kvpress_golden.py`, and nothing of criticalkv.
`criticalkv bench eval-sweep --kvpress-python kvpress-env/bin/python` starts and feeds it:

    ← {"presses": ["snapkv", …], "device": "cpu", "dtype": "float32", "versions": {"kvpress": …}}
    → {"context_ids": […], "question_ids": […], "max_tokens": 32, "press": "snapkv", "kept": 0.2}
    ← {"answer": "…", "seconds": 1.9}

Each request is one run of the pipeline's forward, as kvpress' evaluation does it for each
press and compression ratio: prefill under the press, then greedy tokens. The first line
says that the model is loaded, and how.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    CriticalAdaKVPress,
    CriticalKVPress,
    KVPressTextGenerationPipeline,
    SnapKVPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PRESSES: dict[str, Callable[[float], BasePress]] = {
    "snapkv": lambda r: SnapKVPress(r),
    "criticalkv": lambda r: CriticalKVPress(SnapKVPress(r)),
    "adakv": lambda r: AdaKVPress(SnapKVPress(r)),
    "criticaladakv": lambda r: CriticalAdaKVPress(SnapKVPress(r)),
}


@torch.inference_mode()
def main() -> None:
    """Load the model, say so, then answer until the input ends."""
    given = arguments()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype))
    model = model.eval().to(given.device)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer, device=given.device)
    print(json.dumps(ready(model)), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tensors = {
            "context_ids": torch.tensor([asked["context_ids"]]),
            "questions_ids": [torch.tensor([asked["question_ids"]])],
        }
        press = PRESSES[asked["press"]](1 - asked["kept"])
        answers = pipeline._forward(tensors, max_new_tokens=asked["max_tokens"], press=press)
        seconds = time.perf_counter() - started
        print(json.dumps({"answer": answers[0], "seconds": seconds}), flush=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def ready(model: PreTrainedModel) -> dict[str, Any]:
    """Say what runs here."""
    return {
        "presses": list(PRESSES),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in ("kvpress", "torch", "transformers")},
    }


if __name__ == "__main__":
    main()
