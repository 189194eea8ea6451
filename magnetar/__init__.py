"""Magnetar: publish-subscribe and queueing on replicated storage, for Python.

    import magnetar

    with magnetar.Client("grpc://localhost:6660") as client:
        producer = client.create_producer("greetings")
        producer.send(b"hello")

The names are those of Apache Pulsar's Python client. __init__.pyi lists them for type checkers and
for the loader. The loader imports a name when it is first used, so that importing one part of
Magnetar does not import all of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
