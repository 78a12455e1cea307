"""Model folders (tokenizers only), and sandboxes bound to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.host.sandbox import Sandbox
from libra_hpc.tasks.policy import write_tokenizer

from .leader import host_settings

InSandbox = Callable[..., Any]


@pytest.fixture(scope="session")
def keychain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keychain-model")
    write_tokenizer(folder, "keychain")
    return folder


@pytest.fixture(scope="session")
def arithmetic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic-model")
    write_tokenizer(folder, "arithmetic")
    return folder


@pytest.fixture
def in_sandbox(tmp_path: Path) -> InSandbox:
    """``in_sandbox(body, tools, **limits)`` runs ``await body(sandbox)`` on a new loop and closes the sandbox."""

    def run(
        body: Callable[[Sandbox], Awaitable[Any]], tools: Mapping[str, Callable[..., Any]] | None = None, **limits: Any
    ) -> Any:
        async def inside() -> Any:
            sandbox = Sandbox(tools or {}, host_settings(task="test", model="", **limits), tmp_path)
            try:
                await sandbox.start()
                return await body(sandbox)
            finally:
                sandbox.close()
                assert list(tmp_path.iterdir()) == []

        return asyncio.run(inside())

    return run
