"""Restoring lost copies: marks, the auditor that sets them, the replicator that works them off."""
