"""Simulated engine, trainer and environment-host processes of dry runs: real protocols, modelled times."""
