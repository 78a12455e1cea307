"""The coordinator, in the agent of rank 0: carries out what pure policies decide."""
