"""Fixtures of the kinds of sources."""

from __future__ import annotations

from typing import Any

import pytest
from pipelines import SOURCES, TENSORFLOW, TORCH, Maker, require


@pytest.fixture(params=SOURCES)
def source_name(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return request.param


@pytest.fixture
def make(source_name: str) -> Maker:
    """Makes a dataset of batches of some rows."""
    return SOURCES[source_name]


@pytest.fixture
def tensorflow() -> Any:
    require("tf.data")
    return TENSORFLOW


@pytest.fixture
def torch() -> Any:
    require("torch")
    return TORCH
