"""``python -m libra_hpc.engine --socket PATH --config JSON``: one vLLM engine for the agent at PATH."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from libra_hpc.errors import UserError
from libra_hpc.process.dump import dump_on_request
from libra_hpc.process.leave import leave

from .settings import prepare_process, read_config, under_one_name


def main() -> int:
    """Run the engine; exit codes: 0 asked to leave, 1 failed, 2 bad configuration."""
    parser = argparse.ArgumentParser(prog="python -m libra_hpc.engine")
    parser.add_argument("--socket", required=True, help="Unix-domain socket the agent listens on")
    parser.add_argument("--config", required=True, help="JSON file with an EngineConfig")
    args = parser.parse_args()
    dump_on_request()
    try:
        config = read_config(args.config)
        config = under_one_name(config, Path(args.config).absolute().with_suffix(".folder"))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    prepare_process(config)
    # vLLM reads its environment when it is imported.
    from .process import serve

    return serve(args.socket, config)


if __name__ == "__main__":
    leave(main())
