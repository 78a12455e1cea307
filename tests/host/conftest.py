"""Model folders (tokenizers only), and sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.host.sandbox import Sandbox
from tests.example_files import write_keychain_tokenizer, write_text_tokenizer

from .leader import host_settings

OpenSandbox = Callable[..., AbstractAsyncContextManager[Sandbox]]


@pytest.fixture(scope="session")
def keychain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keychain_tokenizer(tmp_path_factory.mktemp("keychain-model"))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_tokenizer(tmp_path_factory.mktemp("text-model"))


@pytest.fixture
def sandbox(tmp_path: Path) -> OpenSandbox:
    """``async with sandbox(tools, **limits) as box``: a started sandbox that leaves nothing in its folder."""

    @asynccontextmanager
    async def opened(tools: Mapping[str, Callable[..., Any]] | None = None, **limits: Any) -> AsyncIterator[Sandbox]:
        box = Sandbox(tools or {}, host_settings(task="test", model="", **limits).task, tmp_path)
        try:
            await box.start()
            yield box
        finally:
            await box.close()
            assert list(tmp_path.iterdir()) == []

    return opened
