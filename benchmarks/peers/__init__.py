"""Runs the loads of Magnetar's own benchmarks on other systems."""
