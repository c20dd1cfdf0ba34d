"""A rank's side of the control plane: a thread with a socket around the pure rank of `control.protocol`."""
