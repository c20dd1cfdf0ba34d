"""From a recipe to an artifact and an initial state on disk: capture, passes, compilation, measured costs."""
