"""How many bytes a root may hold: accounts, the ledger that writers share, and leases of one writer."""
