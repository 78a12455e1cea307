"""What all tests of the endpoint need."""

from __future__ import annotations

import pytest

from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return TaskTokenizer(write_chat_folder(tmp_path_factory.mktemp("policy")))
