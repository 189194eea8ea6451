"""Metadata: the store, its records, and what is built on both (election, leases, ledger ids)."""
