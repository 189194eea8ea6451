"""Repair of lost copies: the auditor writes under-replication records, replicators act on them."""
