"""A box: the private place in which an agent and its commands run, and which dies with its episode."""
