"""Rollout steps beside the users of a server: the page it shares, the gate, and what a lender gives to its guest."""
