"""Child processes of an agent: start and end, deadlines on progress, restart budgets, orphans, private folders."""
