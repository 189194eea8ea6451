"""Other systems under the loads of Magnetar's own benchmarks."""
