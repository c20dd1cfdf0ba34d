"""The captured program, its units and the schema of their metadata."""
