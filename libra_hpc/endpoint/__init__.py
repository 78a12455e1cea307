"""Any program is the agent: an HTTP endpoint of one episode over exact tokens."""
