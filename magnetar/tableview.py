"""The table view, under the name of Apache's module `pulsar.tableview`."""

from magnetar.client.sync import TableView

__all__ = ["TableView"]
