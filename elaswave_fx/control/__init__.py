"""Who is alive, and which steps are committed: pure state machines `(state, event, now) -> (state, actions)`."""
