"""In the place of torchvision on `PYTHONPATH`: vLLM imports it for the language model of Qwen3.5 too, which calls
nothing of it. PyPI has only builds for CUDA, which do not import without it."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

__version__ = "0.28.0"
for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = MagicMock()
