"""``python -m libra_hpc.engine --socket FD --config JSON``: one vLLM engine for the agent at the other end of FD."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.process.entry import leave, run

from .settings import prepare_process, read_config, under_one_name


def start(link: int, file: Path) -> int:
    """Run the engine; exit codes: 0 asked to leave, 1 failed, 2 bad configuration."""
    config = read_config(file)
    prepare_process(config)
    config = under_one_name(config, file.absolute().with_suffix(".folder"))
    # vLLM reads its environment when it is imported.
    from .process import serve

    return serve(link, config)


if __name__ == "__main__":
    leave(run("libra_hpc.engine", start))
