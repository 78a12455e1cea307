"""What Slurm knows of jobs, and the one state of a run."""
