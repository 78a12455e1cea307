"""Stand-ins for the processes below the agents: they speak the same protocols and take the modelled time instead of
computing."""
