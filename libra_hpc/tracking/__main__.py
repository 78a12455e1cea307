"""``python -m libra_hpc.tracking RUN``: sends the metrics of a run to its trackers (`sidecar`)."""

import sys

from .sidecar import main

sys.exit(main(sys.argv[1:]))
