"""The next plan of a job whose ranks, speeds or requested layout have changed."""
