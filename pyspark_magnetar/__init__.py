"""Registers the format "magnetar": Spark imports every module named `pyspark_*`."""

from magnetar.spark.datasource import MagnetarFormat as DefaultSource

__all__ = ["DefaultSource"]
