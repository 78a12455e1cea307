"""The login node's side of Slurm: queries, the batch script, submission, single jobs, and the same run without
Slurm."""
