"""Models that several folders' tests run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import make_model

from criticalkv.shared.config import ModelConfig
from criticalkv.shared.model.loader import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., LoadedModel]:
    """Factory of tiny random models."""
    torch.set_num_threads(1)
    return make_model


@pytest.fixture(scope="session")
def demo_model() -> LoadedModel:
    """The small real model."""
    return load_model(ModelConfig(), threads=2)
