"""Shared by the tests of carriers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.weights.chain import Chain
from tests.weights.nodes import node_folders


@pytest.fixture
def chain() -> Iterator[Chain]:
    with node_folders() as folder, ExitStack() as stack:
        yield Chain(stack, folder, 3)
