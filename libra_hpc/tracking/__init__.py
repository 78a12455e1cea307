"""Metrics of a run, sent to trackers while it runs."""
