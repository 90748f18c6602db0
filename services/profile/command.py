"""`criticalkv profile`: load a model, probe it with a progress bar, write the file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from criticalkv.services.profile.probe import probe
from criticalkv.shared.config import Config
from criticalkv.shared.eviction.profile import Profile, save_profile
from criticalkv.shared.model.loader import load_model


def run(
    config: Config, *, samples: int, length: int, seed: int, folder: Path
) -> tuple[Profile, Path]:
    """Make the profile of the configured model; return it and its file."""
    model = load_model(config.model)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("haystacks", total=samples)
        profile = probe(
            model,
            samples=samples,
            length=length,
            seed=seed,
            tick=lambda: progress.advance(task),
        )
    return profile, save_profile(profile, folder)
