"""The owner of a run: a small process beside the ranks, which starts them and decides what follows their end."""
