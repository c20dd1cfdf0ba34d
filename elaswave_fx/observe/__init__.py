"""What the user sees of a run: progress, metrics, events and the files of the run directory."""
