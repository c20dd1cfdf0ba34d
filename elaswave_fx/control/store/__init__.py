"""The storage of a job's register and ledger: an interface with compare-and-swap, and files for a local job."""
