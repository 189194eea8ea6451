"""The table of the commands that set, show and remove policies. The names are Pulsar's.

Each row is a policy, and makes three commands at each level where it has a path: `set-NAME`,
`get-NAME` and `remove-NAME`. The broker checks the values with its own table,
`broker/operations/policy_table.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE = re.compile(r"(-1|\d{1,18})([kKmMgGtT]?)[bB]?")
_TIME = re.compile(r"(-1|\d{1,15})([smhdwSMHDW]?)")
_FACTORS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of a `set-` command."""

    key: str  # the key in the JSON body; "": the value is the body
    names: tuple[str, ...]
    text: str
    kind: Any = int
    value: Callable[[Any], Any] = lambda given: given  # converts a given value to the sent value
    default: Any = ...  # `...`: the option is required; None: the key is left out


@dataclass(frozen=True, slots=True)
class PolicyCommands:
    """`set-NAME`, `get-NAME` and `remove-NAME` of one policy."""

    name: str
    text: str
    namespace_path: str = ""  # the last part of the REST path; "": not at this level
    topic_path: str = ""
    flags: tuple[Flag, ...] = ()
    topic_flags: tuple[Flag, ...] = ()  # (): `flags`
    topic_name: str = ""  # "": `name`
    parameter: str = ""  # the query parameter that carries a topic's value; "": the body carries it


def size(text: str) -> int:
    """Parse a size such as 4096, 10M, 16G or 3T into bytes. -1: no limit. Raises BadParameter."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size; expected for example 4096, 10M or 16G")
    return int(found[1]) * (1 if found[1] == "-1" else _FACTORS[found[2].lower()])


def seconds(text: str) -> int:
    """Parse a time such as 90, 90s, 10m, 3h, 2d or 5w into seconds. -1: no limit. Raises
    BadParameter."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a time; expected for example 90s, 10m or 3h")
    return int(found[1]) * (1 if found[1] == "-1" else _SECONDS[found[2].lower()])


def _megabytes(text: str) -> int:
    return _whole(text, size(text), 1 << 20, "1M")


def _minutes(text: str) -> int:
    return _whole(text, seconds(text), 60, "1m")


def _whole(text: str, found: int, unit: int, least: str) -> int:
    if found in (-1, 0):
        return found
    if found < unit:
        raise typer.BadParameter(f"{text} is less than {least}; 0 keeps nothing, -1: no limit")
    return found // unit


def _milliseconds(text: str) -> int:
    return seconds(text) * 1_000


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_PARTITIONED = "partitioned or non-partitioned"
_NO_LIMIT = "0: no limit"
_ENABLE = ("--enable/--disable", "-e/-d")
_RATE_TEXT = "-1: no limit"
_QUOTA_TYPE = "destination_storage or message_age"


def _count(*names: str, text: str = _NO_LIMIT) -> tuple[Flag, ...]:
    return (Flag("", names, text),)


_DISPATCH = (
    Flag(
        "dispatchThrottlingRateInMsg",
        ("--msg-dispatch-rate", "-md"),
        f"messages in a period; {_RATE_TEXT}",
        default=-1,
    ),
    Flag(
        "dispatchThrottlingRateInByte",
        ("--byte-dispatch-rate", "-bd"),
        f"bytes in a period; {_RATE_TEXT}",
        default=-1,
    ),
    Flag("ratePeriodInSecond", ("--dispatch-rate-period", "-dt"), "seconds", default=1),
)

POLICIES: Final = (
    PolicyCommands(
        "retention",
        "how long, and up to which size, acknowledged messages are kept",
        "retention",
        "retention",
        (
            Flag(
                "retentionTimeInMinutes",
                ("--time", "-t"),
                "for example 90m, 3h, 2d; 0: none, -1: no limit",
                str,
                _minutes,
            ),
            Flag(
                "retentionSizeInMB",
                ("--size", "-s"),
                "for example 10M, 16G; 0: none, -1: no limit",
                str,
                _megabytes,
            ),
        ),
    ),
    PolicyCommands(
        "message-ttl",
        "the time after which unacknowledged messages expire",
        "messageTTL",
        "messageTTL",
        (
            Flag(
                "", ("--messageTTL", "--ttl", "-ttl"), "seconds, or 5m, 2h; 0: never", str, seconds
            ),
        ),
        (Flag("", ("--ttl", "-t"), "seconds, or 5m, 2h; 0: never", str, seconds),),
        parameter="messageTTL",
    ),
    PolicyCommands(
        "persistence",
        "the ensemble and the quorums of new ledgers",
        "persistence",
        "persistence",
        (
            Flag("bookkeeperEnsemble", ("--bookkeeper-ensemble", "-e"), "bookies of a ledger"),
            Flag(
                "bookkeeperWriteQuorum", ("--bookkeeper-write-quorum", "-w"), "copies of an entry"
            ),
            Flag("bookkeeperAckQuorum", ("--bookkeeper-ack-quorum", "-a"), "copies before an ack"),
            Flag(
                "managedLedgerMaxMarkDeleteRate",
                ("--ml-mark-delete-max-rate", "-r"),
                "cursor writes per second; stored for tools of Pulsar, not applied",
                float,
                default=1.0,
            ),
        ),
    ),
    PolicyCommands(
        "deduplication",
        "whether the broker drops messages that it has stored already",
        "deduplication",
        "deduplicationEnabled",
        (Flag("", _ENABLE, "", bool),),
    ),
    PolicyCommands(
        "delayed-delivery",
        "whether messages are delivered later when their producers ask for it",
        "delayedDelivery",
        "delayedDelivery",
        (
            Flag("active", _ENABLE, "", bool),
            Flag("tickTime", ("--time", "-t"), "precision, 1s or more", str, _milliseconds, "1s"),
            Flag(
                "maxDeliveryDelayInMillis",
                ("--max-delay", "-md"),
                "the longest delay; 0: no limit",
                str,
                _milliseconds,
                "0",
            ),
        ),
    ),
    PolicyCommands(
        "auto-topic-creation",
        "whether producers and consumers create missing topics",
        "autoTopicCreation",
        "",
        (
            Flag("allowAutoTopicCreation", _ENABLE, "", bool),
            Flag("topicType", ("--type", "-t"), _PARTITIONED, str, default="non-partitioned"),
            Flag("defaultNumPartitions", ("--num-partitions", "-n"), "partitions", default=None),
        ),
    ),
    PolicyCommands(
        "auto-subscription-creation",
        "whether consumers create missing subscriptions",
        "autoSubscriptionCreation",
        "autoSubscriptionCreation",
        (Flag("allowAutoSubscriptionCreation", _ENABLE, "", bool),),
    ),
    PolicyCommands(
        "max-producers-per-topic",
        "the largest number of producers of a topic",
        "maxProducersPerTopic",
        "maxProducers",
        _count("--max-producers-per-topic", "-p"),
        _count("--max-producers", "-p"),
        topic_name="max-producers",
    ),
    PolicyCommands(
        "max-consumers-per-topic",
        "the largest number of consumers of a topic",
        "maxConsumersPerTopic",
        "maxConsumers",
        _count("--max-consumers-per-topic", "-c"),
        _count("--max-consumers", "-c"),
        topic_name="max-consumers",
    ),
    PolicyCommands(
        "max-consumers-per-subscription",
        "the largest number of consumers of a subscription",
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
        _count("--max-consumers-per-subscription", "-c"),
    ),
    PolicyCommands(
        "max-subscriptions-per-topic",
        "the largest number of subscriptions of a topic",
        "maxSubscriptionsPerTopic",
        "maxSubscriptionsPerTopic",
        _count("--max-subscriptions-per-topic", "-m"),
    ),
    PolicyCommands(
        "max-unacked-messages-per-consumer",
        "the largest number of unacknowledged messages of a consumer",
        "maxUnackedMessagesPerConsumer",
        "maxUnackedMessagesOnConsumer",
        _count("--max-unacked-messages-per-consumer", "-c"),
        _count("--max-num", "-m"),
    ),
    PolicyCommands(
        "max-unacked-messages-per-subscription",
        "the largest number of unacknowledged messages of a subscription",
        "maxUnackedMessagesPerSubscription",
        "maxUnackedMessagesOnSubscription",
        _count("--max-unacked-messages-per-subscription", "-c"),
        _count("--max-num", "-m"),
    ),
    PolicyCommands(
        "publish-rate",
        "how much the producers of a topic may publish per second",
        "publishRate",
        "publishRate",
        (
            Flag(
                "publishThrottlingRateInMsg",
                ("--msg-publish-rate", "-m"),
                f"messages; {_RATE_TEXT}",
                default=-1,
            ),
            Flag(
                "publishThrottlingRateInByte",
                ("--byte-publish-rate", "-b"),
                f"bytes; {_RATE_TEXT}",
                default=-1,
            ),
        ),
    ),
    PolicyCommands(
        "dispatch-rate",
        "how much a topic may deliver in each period",
        "dispatchRate",
        "dispatchRate",
        _DISPATCH,
    ),
    PolicyCommands(
        "subscription-dispatch-rate",
        "how much a subscription may deliver in each period",
        "subscriptionDispatchRate",
        "subscriptionDispatchRate",
        _DISPATCH,
    ),
    PolicyCommands(
        "subscribe-rate",
        "how often a consumer may subscribe in each period",
        "subscribeRate",
        "subscribeRate",
        (
            Flag("subscribeThrottlingRatePerConsumer", ("--subscribe-rate", "-sr"), _RATE_TEXT),
            Flag("ratePeriodInSecond", ("--subscribe-rate-period", "-st"), "seconds", default=30),
        ),
    ),
    PolicyCommands(
        "subscription-types-enabled",
        "which subscription types are allowed",
        "subscriptionTypesEnabled",
        "subscriptionTypesEnabled",
        (
            Flag(
                "",
                ("--types", "-t"),
                "the allowed types, separated by commas: Exclusive,Shared,Failover,Key_Shared",
                str,
                _names,
            ),
        ),
    ),
    PolicyCommands(
        "inactive-topic-policies",
        "whether and when the broker deletes unused topics",
        "inactiveTopicPolicies",
        "inactiveTopicPolicies",
        (
            Flag(
                "deleteWhileInactive",
                ("--enable-delete-while-inactive/--disable-delete-while-inactive", "-e/-d"),
                "",
                bool,
            ),
            Flag(
                "maxInactiveDurationSeconds",
                ("--max-inactive-duration", "-t"),
                "for example 90s, 10m, 3h",
                str,
                seconds,
            ),
            Flag(
                "inactiveTopicDeleteMode",
                ("--delete-mode", "-m"),
                "delete_when_no_subscriptions or delete_when_subscriptions_caught_up",
                str,
            ),
        ),
    ),
    PolicyCommands(
        "subscription-expiration-time",
        "the time after which unused subscriptions are deleted",
        "subscriptionExpirationTime",
        "",
        _count("--time", "-t", text="minutes; 0: never"),
    ),
    PolicyCommands(
        "schema-compatibility-strategy",
        "the compatibility rule for new versions of a schema",
        "schemaCompatibilityStrategy",
        "schemaCompatibilityStrategy",
        (
            Flag(
                "",
                ("--compatibility", "-c"),
                "ALWAYS_COMPATIBLE, ALWAYS_INCOMPATIBLE, BACKWARD, FORWARD or FULL; the last three"
                " also with the suffix _TRANSITIVE",
                str,
            ),
        ),
    ),
    PolicyCommands(
        "is-allow-auto-update-schema",
        "the permission of clients to add versions of a schema",
        "isAllowAutoUpdateSchema",
        "",
        (Flag("", _ENABLE, "", bool),),
    ),
    PolicyCommands(
        "schema-validation-enforce",
        "whether a producer needs a schema if its topic has one",
        "schemaValidationEnforced",
        "schemaValidationEnforced",
        (Flag("", _ENABLE, "", bool),),
    ),
    PolicyCommands(
        "max-message-size",
        "the largest size of a message of a topic",
        "",
        "maxMessageSize",
        _count("--max-message-size", "-m", text="bytes; 0: as the broker allows"),
    ),
)
BACKLOG_QUOTA: Final = (
    Flag("limitSize", ("--limit", "-l"), "for example 10M, 16G; -1: no quota", str, size, None),
    Flag(
        "limitTime", ("--limitTime", "-lt"), "for example 90s, 3h; -1: no quota", str, seconds, None
    ),
    Flag(
        "policy",
        ("--policy", "-p"),
        "producer_request_hold, producer_exception or consumer_backlog_eviction",
        str,
    ),
)
QUOTA_TYPE: Final = Flag(
    "backlogQuotaType", ("--type", "-t"), _QUOTA_TYPE, str, default="destination_storage"
)
