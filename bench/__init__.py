"""Benchmarks: each prints one table and writes one JSON file under `bench/results/`; none is a test."""
