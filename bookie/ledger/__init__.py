"""Replicated ledgers from the side that writes, reads and recovers them: see PROTOCOL.md."""
