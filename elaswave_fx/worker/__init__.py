"""One rank: its engine, loop, recovery, inputs, checkpoints, and the export of the model."""
