"""Owners and replica holders of the boxes of the state."""
