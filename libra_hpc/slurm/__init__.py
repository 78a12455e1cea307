"""The login node's side of Slurm: queries, batch script, submission, single jobs, and the launcher without Slurm."""
