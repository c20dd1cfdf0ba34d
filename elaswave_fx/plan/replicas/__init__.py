"""Who owns which box of the state, and who keeps its copies."""
