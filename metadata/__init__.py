"""Metadata: the store, its records, and the parts built on both (election, leases, ledger ids)."""
