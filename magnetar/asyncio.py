"""The asyncio client: `async with magnetar.asyncio.Client("grpc://host:6660") as client: ...`"""

from magnetar.client.asyncio import Client, Consumer, Producer, Reader, TableView
from magnetar.client.errors import PulsarException

__all__ = ["Client", "Producer", "Consumer", "Reader", "TableView", "PulsarException"]
