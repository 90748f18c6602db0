"""Run the benchmark's needle cases through the public library kvpress, at equal kept bytes.

Needs the environment described in `kvpress_golden.py`, and nothing of criticalkv:

    criticalkv bench eviction --export cases.json …     # writes the cases, measures nothing
    kvpress-env/bin/python infra/scripts/kvpress_cases.py --model DIR cases.json kvpress.json
    criticalkv bench eviction --kvpress kvpress.json …  # shows both in one report

For each case, press and kept fraction: KL(full ‖ compressed) over the answer's tokens and
whether the answer is the likeliest token by token, both teacher-forced at original
positions. The fraction is the press's own: kvpress keeps fewer bytes only on paper for
presses that mask (AdaKV, KVzip).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
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
    ExpectedAttentionPress,
    KVzipPress,
    SnapKVPress,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

PRESSES: dict[str, Callable[[float], BasePress]] = {
    "kvpress SnapKV": lambda r: SnapKVPress(r),
    "kvpress CriticalKV(SnapKV)": lambda r: CriticalKVPress(SnapKVPress(r)),
    "kvpress AdaKV(SnapKV)": lambda r: AdaKVPress(SnapKVPress(r)),
    "kvpress CriticalAdaKV(SnapKV)": lambda r: CriticalAdaKVPress(SnapKVPress(r)),
    "kvpress AdaKV(ExpectedAttention)": lambda r: AdaKVPress(ExpectedAttentionPress(r)),
    "kvpress KVzip": lambda r: KVzipPress(r),
}
KEPT = (0.1, 0.2)


def follow(model: PreTrainedModel, cache: DynamicCache, n: int, case: dict[str, Any]) -> Tensor:
    """Teacher-force the answer after a cache of n tokens: log probabilities [answer, vocab]."""
    ids = [*case["question_ids"], *case["answer_ids"][:-1]]
    positions = torch.arange(n, n + len(ids))[None]
    out = model(
        input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=positions
    ).logits[0]
    return out[len(case["question_ids"]) - 1 :].float().log_softmax(-1)


def compressed(model: PreTrainedModel, press: BasePress | None, context: Tensor) -> DynamicCache:
    """Run a context, under a press if there is one."""
    cache = DynamicCache()
    if press is None:
        model(input_ids=context, past_key_values=cache)
        return cache
    with press(model):
        model(input_ids=context, past_key_values=cache)
    return cache


def forget(model: PreTrainedModel) -> None:
    """Remove what masking presses leave on the model."""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None


@torch.inference_mode()
def main() -> None:
    """Run every case under every press."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    samples: dict[str, dict[str, list[list[float]]]] = {}
    names: list[str] = []
    for case in json.loads(given.cases.read_text())[: given.count]:
        started = time.monotonic()
        context, wanted = torch.tensor([case["context_ids"]]), torch.tensor(case["answer_ids"])
        n = context.shape[1]
        forget(model)
        full = follow(model, compressed(model, None, context), n, case)
        for name, make in PRESSES.items():
            for kept in KEPT:
                forget(model)
                cache = compressed(model, make(1 - kept), context)
                found = follow(model, cache, n, case)
                kl = float((full.exp() * (full - found)).sum(-1).mean())
                right = float((found.argmax(-1) == wanted).all())
                samples.setdefault(name, {}).setdefault(str(kept), []).append([kl, right])
        names.append(case["name"])
        print(f"{case['name']}: {time.monotonic() - started:.0f} s", flush=True)
        given.out.write_text(json.dumps({"cases": names, "samples": samples}))


if __name__ == "__main__":
    main()
