"""Membership and commits: pure machines `(state, event, now) -> (state, actions)`, their processes and their store."""
