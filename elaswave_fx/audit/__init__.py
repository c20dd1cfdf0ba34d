"""What a run has left behind, held against its data, its configuration and its seed, another run, or its own steps."""
