"""Ways in which bytes pass between machines, whatever they are."""
