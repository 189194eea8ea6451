"""Schemas: they encode values and decode payloads. `magnetar.schema` has the public names."""
