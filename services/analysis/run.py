"""Studies of the command line: load a model, measure texts with a progress bar, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from criticalkv.services.analysis.findings import report_of
from criticalkv.services.analysis.study import ANSWER_TOKENS, Study
from criticalkv.services.analysis.texts import texts
from criticalkv.services.analysis.variants import critical_of, varied
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profiles
from criticalkv.shared.model.loader import load_model
from criticalkv.shared.report import Report

VALUES: Mapping[str, tuple[str, ...]] = {
    "alpha": ("0", "0.25", "0.5", "0.75", "1"),
    "eps": ("0", "0.000001", "0.00001", "0.0001", "0.001", "0.01", "0.1/n"),
    "norm": ("l1", "l2"),
}
"""Of each option, where none are given."""
PER_TOKEN = "/n"


@dataclass(frozen=True)
class Options:
    """What a study looks at.

    Attributes:
        rows: texts.
        tokens: longest context.
        data: folder with MultiNews rows, or None.
        threads: of torch.
    """

    rows: int
    tokens: int
    data: Path | None
    threads: int


def settings(path: Path | None, model: str | None, tiers: str) -> Config:
    """Read the configuration; tiers, and a model that is named, go before its own.

    Raises:
        ConfigError: if tiers, comma-separated, are not ascending fractions.
    """
    given: dict[str, dict[str, Any]] = {"eviction": {"tiers": tiers.split(",")}}
    if model is not None:
        given["model"] = {"path": model}
    return load_config(str(path) if path else None, given)


def perturbation(
    config: Config, options: Options, bases: Sequence[str], critical: Sequence[str] = ()
) -> Report:
    """Compare base methods with their CriticalKV forms.

    Args:
        config: which model.
        options: what to look at.
        bases: policies of one stage.
        critical: options of the CriticalKV forms, key=value.

    Raises:
        ConfigError, PolicyError: before anything is measured.
    """
    policies, compared = {}, {}
    given = dict(_pair(text) for text in critical)
    for text in bases:
        policies[text] = Policy.parse(text)
        policies[f"{text}+critical"] = critical_of(policies[text], given)
        compared[f"{text}+critical"] = text
    return _study(config, options, "perturbation", policies, compared, {})


def sweep(
    config: Config, options: Options, policy: str, option: str, values: Sequence[str] | None
) -> Report:
    """Compare a policy under several values of one option with its base method.

    Args:
        config: which model.
        options: what to look at.
        policy: of two stages.
        option: alpha, eps or norm.
        values: of the option; None: the usual ones.

    Raises:
        ConfigError, PolicyError: before anything is measured.
    """
    named = varied(Policy.parse(policy), selector="twostage")
    policies = {"base": varied(named, selector="plain")}
    for value in values or VALUES[option]:
        policies[f"{option}={value}"] = varied(named, **_change(option, value))
    compared = dict.fromkeys(list(policies)[1:], "base")
    return _study(config, options, f"sweep {option}", policies, compared, {"sweep": option})


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"option {text[:100]!r} is not key=value", param="option")
    return key, value


def _change(option: str, value: str) -> dict[str, str]:
    if option == "eps" and value.endswith(PER_TOKEN):
        return {"eps": value.removesuffix(PER_TOKEN), "eps_per_token": "true"}
    return {option: value}


ROOM = 256
"""Positions of the model that question and answer may need."""


def _study(
    config: Config,
    options: Options,
    name: str,
    policies: Mapping[str, Policy],
    bases: Mapping[str, str],
    details: dict[str, Any],
) -> Report:
    model = load_model(config.model, options.threads)
    spec = model.spec
    profiles = Profiles(
        Path(config.eviction.profiles_dir), spec.model_digest, spec.num_layers, spec.num_kv_heads
    )
    of_policies = {text: profiles.of(policy) for text, policy in policies.items()}
    study = Study(model, policies, config.eviction.tiers, of_policies)
    longest = min(options.tokens, spec.max_positions - ROOM)
    cases = texts(model.chat, options.data, options.rows, longest)
    with Progress(console=Console(stderr=True)) as progress:
        for case in progress.track(cases, description=name):
            study.add(case)
    measured = {
        "model": spec.name,
        "texts": {case.name: len(case.context_ids) for case in cases},
        "answer_tokens": ANSWER_TOKENS,
        "tiers": list(study.tiers),
        "bases": dict(bases),
    }
    return report_of(study, name, bases, measured | details)
