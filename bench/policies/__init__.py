"""Published scheduling policies that the library does not have, one file each: any `rollout.policy` may name one.

Each file imports only `libra_hpc`, so that ``bench/policies/stays.py:RoundRobin`` also works in a run file.
"""

from pathlib import Path

from libra_hpc.policies.scheduling.registry import policy_names

FILES = {
    "cache_aware": "stays.py:CacheAware",
    "cmlfq_cost": "libra.py:CmlfqCost",
    "fit": "programs.py:Fit",
    "kv_router": "programs.py:KvRouter",
    "la_mlfq": "libra.py:LaMlfq",
    "least_live": "stays.py:LeastLive",
    "program_age": "programs.py:ProgramAge",
    "round_robin": "stays.py:RoundRobin",
    "thunder_agent": "programs.py:ThunderAgent",
}
"""Name -> file of this folder and class."""
POLICIES = {name: name for name in policy_names()} | {
    name: str(Path(__file__).with_name(file)) for name, file in FILES.items()
}
"""Name in tables -> name in a run file: the library's policies and those of this folder."""
