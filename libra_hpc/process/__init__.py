"""What the agent's dealings with processes share: deadlines on progress, and budgets of restarts."""
