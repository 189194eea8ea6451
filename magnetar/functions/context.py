"""The interface through which a function calls its runtime while it processes a message."""

from abc import abstractmethod
from typing import Any


class Context:
    """The context in which a function processes one message. Magnetar does not run functions."""

    @abstractmethod
    def get_message_id(self) -> Any:
        """Return the id of the current message."""

    @abstractmethod
    def get_message_key(self) -> Any:
        """Return the key of the current message."""

    @abstractmethod
    def get_message_eventtime(self) -> Any:
        """Return the event time of the current message."""

    @abstractmethod
    def get_message_properties(self) -> Any:
        """Return the properties of the current message."""

    @abstractmethod
    def get_current_message_topic_name(self) -> Any:
        """Return the topic of the current message."""

    @abstractmethod
    def get_function_tenant(self) -> Any:
        """Return the function's tenant."""

    @abstractmethod
    def get_function_namespace(self) -> Any:
        """Return the function's namespace."""

    @abstractmethod
    def get_function_name(self) -> Any:
        """Return the function's name."""

    @abstractmethod
    def get_function_id(self) -> Any:
        """Return the function's id."""

    @abstractmethod
    def get_instance_id(self) -> Any:
        """Return the id of the instance that runs the function."""

    @abstractmethod
    def get_function_version(self) -> Any:
        """Return the function's version."""

    @abstractmethod
    def get_logger(self) -> Any:
        """Return the logger of the function."""

    @abstractmethod
    def get_user_config_value(self, key: Any) -> Any:
        """Return a value of the user configuration, or None."""

    @abstractmethod
    def get_user_config_map(self) -> Any:
        """Return the whole user configuration."""

    @abstractmethod
    def get_secret(self, secret_name: Any) -> Any:
        """Return a secret, or None."""

    @abstractmethod
    def get_partition_key(self) -> Any:
        """Return the partition key of the current message, if it has one."""

    @abstractmethod
    def get_ordering_key(self) -> Any:
        """Return the ordering key of the current message, if it has one."""

    @abstractmethod
    def record_metric(self, metric_name: Any, metric_value: Any) -> Any:
        """Record a value of a metric."""

    @abstractmethod
    def publish(
        self,
        topic_name: Any,
        message: Any,
        serde_class_name: Any = "serde.IdentitySerDe",
        properties: Any = None,
        compression_type: Any = None,
        callback: Any = None,
        message_conf: Any = None,
    ) -> Any:
        """Publish a message on a topic."""

    @abstractmethod
    def get_input_topics(self) -> Any:
        """Return the input topics of the function."""

    @abstractmethod
    def get_output_topic(self) -> Any:
        """Return the output topic of the function."""

    @abstractmethod
    def get_output_serde_class_name(self) -> Any:
        """Return the class name of the output serializer."""

    @abstractmethod
    def ack(self, msgid: Any, topic: Any) -> Any:
        """Acknowledge a message."""

    @abstractmethod
    def incr_counter(self, key: Any, amount: Any) -> Any:
        """Add to a counter of the function."""

    @abstractmethod
    def get_counter(self, key: Any) -> Any:
        """Return a counter of the function."""

    @abstractmethod
    def del_counter(self, key: Any) -> Any:
        """Delete a counter of the function."""

    @abstractmethod
    def put_state(self, key: Any, value: Any) -> Any:
        """Set a value in the state of the function."""

    @abstractmethod
    def get_state(self, key: Any) -> Any:
        """Return a value from the state of the function."""
