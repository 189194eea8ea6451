"""Spark imports every module called `pyspark_*`: this one makes the format "magnetar" known."""

from magnetar.spark.source.datasource import MagnetarDataSource as DefaultSource

__all__ = ["DefaultSource"]
