"""Measurements of engine and trainer steps on this machine, and what is fitted to them."""
