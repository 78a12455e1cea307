"""The check of a GPU machine: ``make gpu-check`` (docs/gpu-check.md)."""
