"""Profiles from the command to the engine: read once, checked, and used at every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from typer.testing import CliRunner

from criticalkv.services import cli
from criticalkv.services.local import LocalEngine
from criticalkv.services.profile import command
from criticalkv.services.profile.probe import probe
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.profile import Profile, load_profile, save_profile
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
IDS = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(5)).tolist()
ROWS = ((0.1, 0.3), (0.0, 0.6), (0.2, 0.2))


@pytest.fixture
def engine(tiny_model: Factory, tmp_path: Path) -> Iterator[LocalEngine]:
    with engine_of(tiny_model(), tmp_path) as local:
        yield local


def engine_of(model: LoadedModel, folder: Path) -> LocalEngine:
    return LocalEngine(model, eviction=EvictionConfig(profiles_dir=str(folder)))


def saved(engine: LocalEngine, folder: Path, **fields: object) -> str:
    base = {"model_digest": engine.model.spec.model_digest, "method": "test", "importance": ROWS}
    profile = Profile.model_validate(base | fields)
    save_profile(profile, folder)
    return profile.digest


def policies(digest: str) -> tuple[str, ...]:
    return (
        f"window+headkv+plain:profile={digest}",
        f"window+headkv+twostage:profile={digest}",
        f"replay+headkv+relative:profile={digest}",
        f"streaming+duo+plain:profile={digest},sinks=4,recent=8",
    )


def test_budgets_follow_the_profile(engine: LocalEngine, tmp_path: Path) -> None:
    digest = saved(engine, tmp_path)
    for policy in policies(digest):
        manifest = engine.manifest(engine.compress_tokens(IDS, policy=policy))
        assert manifest.nested
        lens = torch.tensor(manifest.tier_lens)
        assert lens.shape == (len(manifest.tiers), 3, 2)
        assert (lens[-1] == 150).all()
        lower = lens[manifest.tiers.index("0.4")]
        assert lower[1, 1] == lower.max() > lower[1, 0]


def test_a_profile_is_read_once(engine: LocalEngine, tmp_path: Path) -> None:
    digest = saved(engine, tmp_path)
    first = engine.compress_tokens(IDS, policy=policies(digest)[0])
    (tmp_path / f"{digest}.json").unlink()
    again = engine.compress_tokens(IDS[:100], policy=policies(digest)[0])
    assert first.node_id != again.node_id


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_digest": "f" * 64}, "is of another model"),
        ({"importance": ROWS[:2]}, "has 2 layers of 2 KV heads; the model has 3 of 2"),
        ({"importance": ((0.1, 0.2, 0.3),) * 3}, "has 3 layers of 3 KV heads"),
    ],
)
def test_profiles_of_other_models_are_refused(
    engine: LocalEngine, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    policy = policies(saved(engine, tmp_path, **fields))[0]
    for _ in range(2):
        with pytest.raises(PolicyError, match=message) as refused:
            engine.compress_tokens(IDS, policy=policy)
        assert refused.value.param == "policy"


def test_a_missing_or_changed_profile_is_refused(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="make it there with `criticalkv profile`"):
        engine.compress_tokens(IDS, policy=policies("0" * 64)[0])
    digest = saved(engine, tmp_path)
    path = tmp_path / f"{digest}.json"
    path.write_text(path.read_text().replace("0.6", "0.7"))
    with pytest.raises(PolicyError, match="the file was changed"):
        engine.compress_tokens(IDS, policy=policies(digest)[0])


def test_contexts_compressed_together_are_as_alone(tiny_model: Factory, tmp_path: Path) -> None:
    """Budgets of one context know nothing of another's that runs at the same time."""
    contexts = [IDS[:n] for n in (40, 90, 150, 149, 33)]
    lens = []
    for workers in (1, 5):
        with engine_of(tiny_model(), tmp_path) as engine:
            policy = policies(saved(engine, tmp_path))[0]

            def compressed(ids: list[int], e: LocalEngine = engine, p: str = policy) -> object:
                return e.manifest(e.compress_tokens(ids, policy=p)).tier_lens

            with ThreadPoolExecutor(workers) as pool:
                lens.append(list(pool.map(compressed, contexts)))
    assert lens[0] == lens[1]


def test_the_command_makes_what_the_engine_reads(
    tiny_model: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    monkeypatch.setattr(command, "load_model", lambda _: model)
    options = ["profile", "--samples", "2", "--length", "500", "--seed", "1"]
    done = CliRunner().invoke(cli.app, [*options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    said = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in said] == ["digest", "file", "policy", "policy"]
    profile = load_profile(said[0][1], tmp_path)
    assert Path(said[1][1]) == tmp_path / f"{profile.digest}.json"
    assert profile == probe(model, samples=2, length=500, seed=1)
    with engine_of(model, tmp_path) as engine:
        for line in said[2:]:
            assert engine.compress_tokens(IDS, policy=line[1]).prefill is not None


def test_profiles_live_with_the_users_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert EvictionConfig().profiles_dir == "/data/criticalkv/profiles"


def test_the_real_model_runs_by_its_own_profile(demo_model: LoadedModel, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    made = probe(demo_model, samples=1, length=400, seed=0)
    save_profile(made, tmp_path)
    assert load_profile(made.digest, tmp_path) == made
    heads = sorted((x for row in made.importance for x in row), reverse=True)
    # Few heads of many copy: half of all attention on needles is a tenth of the heads'.
    assert sum(heads[:9]) > 0.5 * sum(heads)
    names = (
        f"window+headkv+plain:profile={made.digest}",
        f"streaming+duo+plain:profile={made.digest}",
    )
    with engine_of(demo_model, tmp_path) as engine:
        for name in names:
            context = engine.compress(topics["with"][:1200], policy=name)
            manifest = engine.manifest(context)
            full = demo_model.spec.num_layers * demo_model.spec.num_kv_heads * manifest.num_tokens
            fractions = []
            for tier in ("0.2", "0.6", "1"):
                turn = engine.ask(context, "What is it about?", tier=tier, max_tokens=2)
                assert turn.start is not None
                kept = manifest.tier_entries()[manifest.tiers.index(tier)]
                assert turn.start.retained_fraction == pytest.approx(kept / full)
                assert turn.token_ids
                fractions.append(turn.start.retained_fraction)
            assert fractions == sorted(fractions)
            assert fractions[-1] == 1
