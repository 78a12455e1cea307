"""Checks of the engines on a real GPU; left out where torch sees none.  One GPU is enough: everything here has a
single rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
