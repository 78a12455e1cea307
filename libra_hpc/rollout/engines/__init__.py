"""What the engine registry keeps beside its engines: deadlines of turns, and totals of lenders."""
