"""The elastic pool of nodes as a state machine."""
