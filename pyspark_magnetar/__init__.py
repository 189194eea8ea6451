"""Registers the format "magnetar": Spark imports every module named `pyspark_*`."""

from magnetar.spark.source.datasource import MagnetarDataSource as DefaultSource

__all__ = ["DefaultSource"]
