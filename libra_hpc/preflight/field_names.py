"""Errors of parts that know no run file (devices, models, traces) with the key that had the value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, error_text, invalid


@contextmanager
def reading(field: str, path: str) -> Iterator[None]:
    """What the file system refuses is a mistake in ``field``."""
    try:
        yield
    except OSError as error:
        raise invalid(field, path, error_text(error), "a path that you may read") from error


@contextmanager
def naming(config: RunConfig) -> Iterator[None]:
    """``device = 'a80': ...`` becomes ``planner.device = 'a80': ...``, and a trace's path ``planner.trace = ...``."""
    try:
        yield
    except UserError as error:
        text, keys, traces = str(error), _keys(config), _traces(config)
        kind, mark, rest = text.partition(" = ")
        if mark and kind in keys:
            raise UserError(f"{keys[kind]} = {rest}") from error
        for key, path in traces.items():
            if path and text.startswith(path):
                raise UserError(f"{key} = {path!r}: {text.removeprefix(path).lstrip(': ,')}") from error
        raise


def _keys(config: RunConfig) -> dict[str, str]:
    """Key of a run file by what the other rooms call its value."""
    sections = ["simulated", "planner"] if config.run.engine == "simulated" else ["planner"]

    def given(key: str, otherwise: str) -> str:
        """The first section that has the key."""
        return next((f"{name}.{key}" for name in sections if getattr(getattr(config, name), key)), otherwise)

    return {
        "device": given("device", "components.*.gpu_type"),
        "device file": given("devices", "planner.devices"),
        "model": given("model", "model.path"),
        "calibration file": "simulated.calibration",
        "preset": "simulated.presets",
        "max_context": "rollout.max_model_len",
    }


def _traces(config: RunConfig) -> dict[str, str]:
    return {"planner.trace": config.planner.trace, "simulated.trace": config.simulated.trace}
