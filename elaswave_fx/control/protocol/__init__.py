"""The agreement on epochs and commits as pure machines `(state, event, now) -> (state, actions)`."""
