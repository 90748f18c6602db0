"""Record, index by index, what the public library kvpress keeps: the tests' golden files.

Needs an environment of its own (kvpress 0.5.5 pins transformers below 5.3) and nothing of
criticalkv:

    python3.11 -m venv kvpress-env
    kvpress-env/bin/pip install 'torch==2.13.0' 'kvpress==0.5.5' 'transformers==5.2.0'
    kvpress-env/bin/python infra/scripts/kvpress_golden.py --model DIR

DIR is SmolLM2-135M-Instruct as `criticalkv demo` saves it. Writes
tests/shared/eviction/golden/kvpress-{tiny,smollm2-135m}.npz. Equal input, equal bytes.

Every press decides on the tensors of one plain forward, through its own `compress`, called
with what its forward hook would pass, its own scores computed before from the real keys.
Which entries it kept is read off the keys it returns, or off `masked_key_indices` where a
press only masks. On the tiny model each decision is compared with the press run as its
users run it: in its context manager, the returned keys matched bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    CriticalAdaKVPress,
    CriticalKVPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    PyramidKVPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses import kvzip_press
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from golden_model import (  # noqa: E402
    Golden,
    golden_ids,
    golden_model,
    weights_digest,
    write_golden,
)

RATIOS = [0.9, 0.75, 0.5, 0.2]
TOLERANCE = 1e-5
UNDERFLOW = 1e-40  # among the smallest of fp32
TRIALS = 16
NUM_TEXT_TOKENS = 251
SINK, RECENT = 16, 48
Mask = NDArray[np.bool_]
MakePress = Callable[[], BasePress]

CASES: dict[str, MakePress] = {
    "snapkv": SnapKVPress,
    "snapkv-w32": lambda: SnapKVPress(window_size=32),
    "snapkv-w8-k7": lambda: SnapKVPress(window_size=8, kernel_size=7),
    "tova": TOVAPress,
    "streaming_llm": StreamingLLMPress,
    "knorm": KnormPress,
    "keydiff": KeyDiffPress,
    "expected": ExpectedAttentionPress,
    "expected-mean": lambda: ExpectedAttentionPress(use_covariance=False),
    "expected-novnorm": lambda: ExpectedAttentionPress(use_vnorm=False),
    "expected-eps": lambda: ExpectedAttentionPress(epsilon=0.01),
    "pyramidkv": PyramidKVPress,
    "pyramidkv-w8": lambda: PyramidKVPress(window_size=8),
    "adakv-snapkv": lambda: AdaKVPress(SnapKVPress()),
    "adakv-snapkv-w8": lambda: AdaKVPress(SnapKVPress(window_size=8)),
    "adakv-knorm": lambda: AdaKVPress(KnormPress()),
    "adakv-expected": lambda: AdaKVPress(ExpectedAttentionPress()),
    "criticalkv-snapkv": lambda: CriticalKVPress(SnapKVPress()),
    "criticalkv-snapkv-w8": lambda: CriticalKVPress(SnapKVPress(window_size=8)),
    "criticalkv-expected": lambda: CriticalKVPress(ExpectedAttentionPress(use_vnorm=False)),
    "criticalkv-tova": lambda: CriticalKVPress(TOVAPress()),
    "criticalkv-knorm": lambda: CriticalKVPress(KnormPress()),
    "criticaladakv-snapkv": lambda: CriticalAdaKVPress(SnapKVPress()),
    "criticaladakv-snapkv-w8": lambda: CriticalAdaKVPress(SnapKVPress(window_size=8)),
    "criticaladakv-expected": lambda: CriticalAdaKVPress(ExpectedAttentionPress(use_vnorm=False)),
    "duo": DuoAttentionPress,
    "kvzip": KVzipPress,
    "kvzip-layerwise": lambda: KVzipPress(layerwise=True),
    "kvzip-chunk": lambda: KVzipPress(chunk_size=96),
}


@dataclass(frozen=True)
class Layer:
    """What one layer's forward hook would pass to `compress`.

    Attributes:
        hidden: [1, n, hidden].
        keys: [1, num_kv_heads, n, head_dim], after RoPE.
        values: like keys.
    """

    module: nn.Module
    hidden: Tensor
    keys: Tensor
    values: Tensor
    kwargs: dict[str, Any]


class Capture(BasePress):
    """A press that keeps everything and remembers what it was shown."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Remember and return the same keys and values."""
        del attentions
        self.layers.append(Layer(module, hidden_states, keys, values, kwargs))
        return keys, values


class LetterTokenizer:
    """Stands in for the tiny model's tokenizer: one token per byte, no chat template."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> Tensor:
        """Return [1, bytes of text]."""
        return torch.tensor([[byte % 97 for byte in text.encode()]], dtype=torch.int64)


class Noise:
    """Changes scores by up to `TOLERANCE`, relatively, and unties those that underflowed to 0.

    Trial 0 changes nothing.
    """

    def __init__(self, trial: int) -> None:
        self._trial = trial
        self._generator = torch.Generator().manual_seed(trial)

    def __call__(self, score: Tensor) -> Tensor:
        """Return a changed copy."""
        if self._trial == 0:
            return score.clone()
        u = torch.rand(score.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return (score.double() * (1 + TOLERANCE * u) + UNDERFLOW * u).to(score.dtype)


def head_scores(num_layers: int, num_kv_heads: int) -> NDArray[np.float64]:
    """Return distinct retrieval scores [num_layers, num_kv_heads] for DuoAttention."""
    count = num_layers * num_kv_heads
    order = np.random.RandomState(7).permutation(count)
    scores: NDArray[np.float64] = (order / count).reshape(num_layers, num_kv_heads)
    return scores


def set_ratio(press: BasePress, ratio: float) -> None:
    """Set what share the press removes; DuoAttention's is a share of heads."""
    name = "head_compression_ratio" if isinstance(press, DuoAttentionPress) else "compression_ratio"
    setattr(press, name, ratio)


def describe(press: BasePress) -> dict[str, Any]:
    """Return the class name and the parameters, nested."""
    found: dict[str, Any] = {"press": type(press).__name__}
    for name, value in sorted(vars(press).items()):
        if isinstance(value, BasePress):
            found[name] = describe(value)
        elif "compression_ratio" not in name and isinstance(value, bool | int | float):
            found[name] = value
    if isinstance(press, KVzipPress):
        internal = ("context_length", "prefix_length", "start_idx", "end_idx")
        return {name: value for name, value in found.items() if name not in internal}
    return found


def masked_of(module: nn.Module, num_kv_heads: int, n: int) -> Mask | None:
    """Return what a masking press left to keep, [num_kv_heads, n]; None if it set no mask."""
    indices = module.masked_key_indices
    module.masked_key_indices = None
    if indices is None:
        return None
    kept = np.ones((num_kv_heads, n), dtype=bool)
    kept[indices[1].numpy(), indices[2].numpy()] = False
    return kept


def kept_of(before: Tensor, after: Tensor) -> Mask:
    """Find each returned key among the original ones, bit for bit: [num_kv_heads, n]."""
    kept = np.zeros(before.shape[1:3], dtype=bool)
    for head in range(before.shape[1]):
        where = {key.numpy().tobytes(): i for i, key in enumerate(before[0, head])}
        assert len(where) == before.shape[2], "two equal keys"
        kept[head, [where[key.numpy().tobytes()] for key in after[0, head]]] = True
    assert kept.sum() == after.shape[1] * after.shape[2], "an entry was returned twice"
    return kept


def run_compress(press: BasePress, layer: Layer) -> Mask:
    """Let the press decide about one layer, its scores known: [num_kv_heads, n].

    The keys it cuts are the entries' indices, so that what it returns names them.
    """
    heads, n = layer.keys.shape[1:3]
    layer.module.masked_key_indices = None
    index = torch.arange(n, dtype=torch.float64)[:, None].expand_as(layer.keys[0])[None]
    keys, _ = press.compress(layer.module, layer.hidden, index, layer.values, None, layer.kwargs)
    masked = masked_of(layer.module, heads, n)
    if masked is not None:
        return masked
    kept = np.zeros((heads, n), dtype=bool)
    np.put_along_axis(kept, keys[0, :, :, 0].long().numpy(), True, axis=1)
    return kept


@contextmanager
def replayed_scores(press: BasePress, layer: Layer) -> Iterator[list[Noise]]:
    """Compute scores and value norms once; put the yielded list's noise on each use."""
    noise = [Noise(0)]
    if isinstance(press, DuoAttentionPress):
        yield noise
        return
    scorer = getattr(press, "press", press)
    assert isinstance(scorer, ScorerPress)
    arguments = (layer.module, layer.hidden, layer.keys, layer.values, None, layer.kwargs)
    score, original = scorer.score(*arguments), CriticalKVPress.vwl1norm
    norm = original(layer.values, layer.module) if scorer is not press else score
    scorer.score = lambda *_: noise[0](score)
    CriticalKVPress.vwl1norm = staticmethod(lambda *_: noise[0](norm))
    try:
        yield noise
    finally:
        del scorer.score
        CriticalKVPress.vwl1norm = staticmethod(original)


@contextmanager
def ties_to(lowest: bool) -> Iterator[None]:
    """Make top-k give ties to the lowest or to the highest index."""
    original, method = torch.topk, Tensor.topk

    def topk(score: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        flipped = score if lowest else score.flip(dim)
        values, indices = flipped.sort(dim=dim, descending=True, stable=True)
        indices = indices if lowest else score.shape[dim] - 1 - indices
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    torch.topk = Tensor.topk = topk
    try:
        yield
    finally:
        torch.topk, Tensor.topk = original, method


def near_of(run: Callable[[Noise], Mask], kept: Mask, trials: int) -> Mask:
    """Return what some noise, or another rule for ties, decides otherwise."""
    near = np.zeros_like(kept)
    for trial in range(1, trials + 1):
        near |= run(Noise(trial)) ^ kept
    for lowest in (True, False) if trials else ():
        with ties_to(lowest):
            near |= run(Noise(0)) ^ kept
    return near


def decide_layer(press: BasePress, layer: Layer, trials: int) -> tuple[Mask, Mask]:
    """Return kept and near, each [num_kv_heads, n]."""
    with replayed_scores(press, layer) as noise:

        def run(changed: Noise) -> Mask:
            noise[0] = changed
            return run_compress(press, layer)

        kept = run(Noise(0))
        return kept, near_of(run, kept, trials)


def decide(
    make: MakePress, model: PreTrainedModel, layers: list[Layer], trials: int
) -> tuple[Mask, Mask]:
    """Return kept and near, each [ratios, layers, num_kv_heads, n]."""
    kept, near = [], []
    for ratio in RATIOS:
        press = make()
        set_ratio(press, ratio)
        press.post_init_from_model(model)
        found = [decide_layer(press, layer, trials) for layer in layers]
        kept.append(np.stack([k for k, _ in found]))
        near.append(np.stack([n for _, n in found]))
    return np.stack(kept), np.stack(near)


def plain_forward(model: PreTrainedModel, ids: Tensor) -> list[Layer]:
    """Run the model once and return what each layer's hook saw."""
    capture = Capture()
    with capture(model):
        model(ids, past_key_values=DynamicCache())
    return capture.layers


class ZipRecorder:
    """Lets a KVzipPress score once and decide at every ratio and trial."""

    def __init__(self, press: KVzipPress, trials: int) -> None:
        self.kept: list[Mask] = []
        self.near: list[Mask] = []
        self.replay_ids: list[list[int]] = []
        self.prefix_length = 0
        self._press, self._trials = press, trials
        self._compress, self._prepare = press.compress_post, press.prepare
        press.compress_post, press.prepare = self._record, self._prepare_and_keep

    def _prepare_and_keep(self, *arguments: Any, **options: Any) -> list[tuple[Tensor, Tensor]]:
        pairs = self._prepare(*arguments, **options)
        self.replay_ids = [replay[0].tolist() for _, replay in pairs]
        self.prefix_length = self._press.prefix_length
        return pairs

    def _once(self, model: PreTrainedModel, score: Tensor, noise: Noise) -> Mask:
        self._press.score_val = noise(score)
        self._compress(model)
        masks = [masked_of(x.self_attn, *score.shape[2:]) for x in model.model.layers]
        return np.stack([mask for mask in masks if mask is not None])

    def _record(self, model: PreTrainedModel) -> None:
        score = self._press.score_val
        for ratio in RATIOS:
            self._press.compression_ratio = ratio
            run = partial(self._once, model, score)
            self.kept.append(run(Noise(0)))
            self.near.append(near_of(run, self.kept[-1], self._trials))


def decide_zip(
    press: KVzipPress, model: PreTrainedModel, ids: Tensor, trials: int
) -> tuple[Mask, Mask, dict[str, Any]]:
    """Return kept, near [ratios, layers, num_kv_heads, n] and what was replayed."""
    press.compression_ratio = 0.5
    recorder = ZipRecorder(press, trials)
    torch.set_default_dtype(model.dtype)  # its mask has the default type and fails in fp64
    with press(model):
        model(ids, past_key_values=DynamicCache())
    torch.set_default_dtype(torch.float32)
    assert len(recorder.kept) == len(RATIOS)
    facts = {"prefix_length": recorder.prefix_length, "replay_ids": recorder.replay_ids}
    return np.stack(recorder.kept), np.stack(recorder.near), facts


def as_users_run_it(make: MakePress, ratio: float, model: PreTrainedModel, ids: Tensor) -> Mask:
    """Run the press in its own context manager: kept [layers, num_kv_heads, n]."""
    full, cache = DynamicCache(), DynamicCache()
    model(ids, past_key_values=full)
    press = make()
    set_ratio(press, ratio)
    with press(model):
        model(ids, past_key_values=cache)
    kept = []
    for i, layer in enumerate(model.model.layers):
        keys = full.layers[i].keys
        masked = masked_of(layer.self_attn, keys.shape[1], keys.shape[2])
        kept.append(kept_of(keys, cache.layers[i].keys) if masked is None else masked)
    return np.stack(kept)


def decide_all(
    model: PreTrainedModel, ids: Tensor, trials: int
) -> tuple[Mask, Mask, dict[str, Any]]:
    """Return kept and near [cases, ratios, layers, num_kv_heads, n] and facts by case."""
    layers = plain_forward(model, ids)
    kept, near, cases = [], [], {}
    for name, make in CASES.items():
        press, facts = make(), {}
        if isinstance(press, KVzipPress):
            found_kept, found_near, facts = decide_zip(press, model, ids, trials)
        else:
            found_kept, found_near = decide(make, model, layers, trials)
        cases[name] = describe(make()) | facts
        kept.append(found_kept)
        near.append(found_near)
    return np.stack(kept), np.stack(near), cases


def counts(masks: Mask) -> list[int]:
    """Return how many entries each ratio has in masks [ratios, …]."""
    return [int(mask.sum()) for mask in masks]


@torch.no_grad()
def record(model: PreTrainedModel, ids: list[int], *, check: bool) -> Golden:
    """Decide in fp32 with noise trials, then in fp64, and describe both."""
    config, tokens = model.config, torch.tensor([ids])
    retrieval = head_scores(config.num_hidden_layers, config.num_key_value_heads)
    DuoAttentionPress.load_attention_pattern = staticmethod(lambda _: (SINK, RECENT, retrieval))
    digest = weights_digest(model)
    kept, near, cases = decide_all(model, tokens, TRIALS)
    for row, name in enumerate(CASES if check else ()):
        for column, ratio in enumerate(RATIOS):
            run = as_users_run_it(CASES[name], ratio, model, tokens)
            assert (run == kept[row, column]).all(), (name, ratio)
    fp64 = decide_all(model.double(), tokens, 0)[0] ^ kept
    for row, name in enumerate(CASES):
        cases[name]["kept"] = counts(kept[row])
        cases[name]["near"] = counts(near[row])
        cases[name]["fp64_differs"] = counts(fp64[row])
        cases[name]["fp64_differs_outside_near"] = counts(fp64[row] & ~near[row])
    cases["duo"] |= {"sink_size": SINK, "recent_size": RECENT, "head_scores": retrieval.tolist()}
    manifest = {
        "versions": {name: version(name) for name in ("kvpress", "torch", "transformers", "numpy")},
        "tolerance": TOLERANCE,
        "compression_ratios": RATIOS,
        "model": {
            "weights_sha256": digest,
            "layers": config.num_hidden_layers,
            "num_q_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_size": config.hidden_size,
            "dtype": "float32",
            "attention": config._attn_implementation,
        },
        "token_ids": ids,
        "cases": cases,
    }
    return Golden(manifest, kept, near, fp64)


def text_ids(path: Path) -> list[int]:
    """Return the chat template's prefix and documentation text, `NUM_TEXT_TOKENS` ids."""
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(path)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], tokenize=False)
    ids = tokenizer.encode(rendered.split("@")[0], add_special_tokens=False)
    text = topics["yield"] + topics["with"] + topics["import"]
    ids += tokenizer.encode(text, add_special_tokens=False)
    return list(ids[:NUM_TEXT_TOKENS])


def record_tiny() -> Golden:
    """Record the tiny random model."""
    original = kvzip_press.AutoTokenizer
    kvzip_press.AutoTokenizer = type(
        "AutoTokenizer", (), {"from_pretrained": staticmethod(lambda _: LetterTokenizer())}
    )
    try:
        return record(golden_model(), golden_ids(), check=True)
    finally:
        kvzip_press.AutoTokenizer = original


def record_real(path: Path) -> Golden:
    """Record the real model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return record(model, text_ids(path), check=False)


def main() -> None:
    """Write the golden files and print how near the cuts were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct; left out: tiny only")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/shared/eviction/golden")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    recorded = {"kvpress-tiny.npz": record_tiny}
    if options.model:
        recorded["kvpress-smollm2-135m.npz"] = lambda: record_real(options.model)
    for name, make in recorded.items():
        golden = make()
        write_golden(options.out / name, golden)
        print(name, (options.out / name).stat().st_size, "bytes")
        for case, facts in golden.manifest["cases"].items():
            print(f"  {case:26}", *(facts[k] for k in ("kept", "near", "fp64_differs")), sep="  ")


if __name__ == "__main__":
    main()
