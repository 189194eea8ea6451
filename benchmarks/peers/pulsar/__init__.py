"""Measures Apache Pulsar, from its published jars, and Magnetar in turns: `make bench-pulsar`."""
