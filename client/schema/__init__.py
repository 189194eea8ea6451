"""Schemas: how values become payloads and back. `magnetar.schema` has their public names."""
