"""Seconds of training and rollout under one layout, and lengths of a workload."""
