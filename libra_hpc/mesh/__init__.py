"""How the agents find and reach each other."""
