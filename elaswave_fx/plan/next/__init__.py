"""The next plan of a job whose ranks, speeds or wishes have changed."""
