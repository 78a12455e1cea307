"""Pictures of runs, plans and simulations, in one style."""
