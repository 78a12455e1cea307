"""Run file to a plan: the search, its best plans simulated, and the keys they become."""
