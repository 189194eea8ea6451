"""Replicated ledgers, seen from the side that writes, reads and recovers them: PROTOCOL.md."""
