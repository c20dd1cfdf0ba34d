"""Instruction lists and engine specs of a plan."""
