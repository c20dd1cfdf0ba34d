"""One rank: its engine, its loop, what it does after a loss, its inputs, its checkpoints, the model at the end."""
