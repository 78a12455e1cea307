"""Jinja templates of sbatch scripts."""
