"""Answer examples through the public library kvpress' own pipeline, one request per line.

Needs the environment described in `kvpress_golden.py`, and nothing of criticalkv.
`criticalkv bench eval-sweep --kvpress-python kvpress-env/bin/python` starts and feeds it:

    → {"context_ids": […], "question_ids": […], "max_tokens": 32, "press": "snapkv", "kept": 0.2}
    ← {"answer": "…", "seconds": 1.9}

Each request is one run of the pipeline's forward, as kvpress' evaluation does it for each
press and compression ratio: prefill under the press, then greedy tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
from transformers import AutoModelForCausalLM, AutoTokenizer

PRESSES: dict[str, Callable[[float], BasePress]] = {
    "snapkv": lambda r: SnapKVPress(r),
    "criticalkv": lambda r: CriticalKVPress(SnapKVPress(r)),
    "adakv": lambda r: AdaKVPress(SnapKVPress(r)),
    "criticaladakv": lambda r: CriticalAdaKVPress(SnapKVPress(r)),
}


@torch.inference_mode()
def main() -> None:
    """Load the model, say so, then answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    print(json.dumps({"ready": True}), flush=True)
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


if __name__ == "__main__":
    main()
