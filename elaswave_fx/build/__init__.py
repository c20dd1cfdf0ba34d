"""Build of an artifact and an initial state on disk from a recipe: capture, passes, compilation, measured costs."""
