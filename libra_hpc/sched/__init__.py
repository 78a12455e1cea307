"""Rollout scheduling policies: pure, behind one `Policy` protocol."""
