"""Compiler passes: one file per pass, named after it. `pipeline.py` orders, verifies, times and dumps them."""
