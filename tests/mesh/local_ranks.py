"""``python -m tests.mesh.local_ranks SIZE LOGS PROGRAM ...``: the ranks of a start without an owner's decisions."""

from __future__ import annotations

import sys
from pathlib import Path

from libra_hpc.owner.ranks import LocalRanks

ranks = LocalRanks(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
while ranks.poll():
    pass
codes = ranks.close()
print("exit codes by rank:", *codes)
sys.exit(codes[0])
