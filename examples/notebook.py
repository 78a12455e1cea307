"""What a notebook needs: `libra_hpc.api` queues runs, follows them and reads what they recorded.

.venv/bin/python examples/notebook.py examples/quickstart.toml
"""

import sys

from libra_hpc import api

job, step, over = api.submit(sys.argv[1], {"run.name": "notebook"}), 0, False
while not over:
    over = job.wait(timeout_s=5.0).over
    for line in job.metrics(since=step):
        step = line["step"]
        print(f"step {step}: reward {line['reward']:.3f} in {line['step_s']:.1f} s")
best = max(job.trajectories(), key=lambda one: one.reward or 0.0)
print(f"{job.name} is {job.state}; the best prompt was {best.prompt_id}: {best.reward:.3f} in {len(best.turns)} turns")
print({run.name: run.state for run in api.Runs("runs")})
