"""Magnetar: publish-subscribe and queueing on quorum-replicated storage, for Python teams."""
