"""Where the job's register and its ledger lie: an interface with compare-and-swap, and files for a local job."""
