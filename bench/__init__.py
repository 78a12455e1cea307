"""Benchmarks: each prints one table and writes one JSON file to `bench/results/`; none is a test."""
