"""The paths of all records in the metadata store. Pure. No other module composes a path.

    /cluster                                             the cluster's id
    /ledgers/next-id                                     counter (ids.py)
    /ledgers/meta/<id / 10^12>/<… / 10^8>/<… / 10^4>/<id>   LedgerMetadata
    /ledgers/under-replicated/<as above>                 UnderReplication
    /ledgers/repair-locks/<id>                           the repairing process, ephemeral
    /ledgers/auditor                                     the elected auditor, ephemeral
    /ledgers/sweeper                                     the elected sweeper, ephemeral
    /ledgers/checked                                     CheckProgress
    /ledgers/repair-paused                               RepairPause
    /bookies/cookies/<bookie>                            BookieCookie
    /bookies/available/<bookie>                          BookieRegistration, ephemeral
    /bookies/draining/<bookie>                           BookieDrain
    /brokers/available/<broker>                          BrokerRegistration, ephemeral
    /tenants/<tenant>                                    TenantRecord
    /namespaces/<tenant>/<namespace>                     NamespaceRecord
    /topic-policies/<tenant>/<namespace>/<domain/topic>  TopicPolicies; <domain/topic> is one node
    /ownership/<tenant>/<namespace>/<bundle>             Ownership
    /topics/<tenant>/<namespace>/<domain>/<topic>        TopicRecord
    /deleted-topics/<full topic name>                    TopicTombstone; the name is one node
    /partitioned-topics/<tenant>/<namespace>/<domain>/<topic>   PartitionedTopic
    /schemas/<tenant>/<namespace>/<topic>                SchemaRecord

Names that users chose are percent-encoded (UTF-8), so that any name is one component that ZooKeeper
accepts.
"""

import re
from typing import Final
from urllib.parse import quote, unquote

from magnetar.metadata.model import LEDGER_ID_MAX, BookieId, BrokerId, LedgerId

CLUSTER: Final = "/cluster"
NEXT_LEDGER_ID: Final = "/ledgers/next-id"
LEDGERS: Final = "/ledgers/meta"
UNDER_REPLICATED: Final = "/ledgers/under-replicated"
REPAIR_LOCKS: Final = "/ledgers/repair-locks"
AUDITOR: Final = "/ledgers/auditor"
LEDGER_SWEEPER: Final = "/ledgers/sweeper"
CHECKED: Final = "/ledgers/checked"
REPAIR_PAUSED: Final = "/ledgers/repair-paused"
BOOKIE_COOKIES: Final = "/bookies/cookies"
BOOKIES_AVAILABLE: Final = "/bookies/available"
BOOKIES_DRAINING: Final = "/bookies/draining"
BROKERS_AVAILABLE: Final = "/brokers/available"
TENANTS: Final = "/tenants"
NAMESPACES: Final = "/namespaces"
TOPIC_POLICIES: Final = "/topic-policies"
OWNERSHIP: Final = "/ownership"
TOPICS: Final = "/topics"
DELETED_TOPICS: Final = "/deleted-topics"
PARTITIONED_TOPICS: Final = "/partitioned-topics"
SCHEMAS: Final = "/schemas"


def ledger(ledger_id: LedgerId) -> str:
    """The path of a ledger's metadata. It has levels of four decimal digits, so each folder below
    the first has at most 10,000 children."""
    return f"{LEDGERS}/{_levels(ledger_id)}"


def under_replicated(ledger_id: LedgerId) -> str:
    return f"{UNDER_REPLICATED}/{_levels(ledger_id)}"


def repair_lock(ledger_id: LedgerId) -> str:
    return f"{REPAIR_LOCKS}/{ledger_id}"


def bookie_cookie(bookie: BookieId) -> str:
    return f"{BOOKIE_COOKIES}/{quoted(bookie)}"


def bookie_available(bookie: BookieId) -> str:
    return f"{BOOKIES_AVAILABLE}/{quoted(bookie)}"


def bookie_draining(bookie: BookieId) -> str:
    return f"{BOOKIES_DRAINING}/{quoted(bookie)}"


def broker_available(broker: BrokerId) -> str:
    return f"{BROKERS_AVAILABLE}/{quoted(broker)}"


def tenant(name: str) -> str:
    return f"{TENANTS}/{quoted(name)}"


def namespaces(tenant: str) -> str:
    """The folder of a tenant's namespaces."""
    return f"{NAMESPACES}/{quoted(tenant)}"


def namespace(tenant: str, name: str) -> str:
    return f"{NAMESPACES}/{quoted(tenant)}/{quoted(name)}"


def topic_policies_folder(tenant: str, namespace: str) -> str:
    """The folder of a namespace's topic policies, of both domains: one watch tells when
    any is added or removed."""
    return f"{TOPIC_POLICIES}/{quoted(tenant)}/{quoted(namespace)}"


def topic_policies(tenant: str, namespace: str, domain: str, topic: str) -> str:
    folder = topic_policies_folder(tenant, namespace)
    return f"{folder}/{quoted(topic_policies_key(domain, topic))}"


def topic_policies_key(domain: str, topic: str) -> str:
    """The last component of `topic_policies`, unquoted. No domain has a slash."""
    return f"{domain}/{topic}"


def ownership_folder(tenant: str, namespace: str) -> str:
    """The folder of the ownership records of a namespace's bundles."""
    return f"{OWNERSHIP}/{quoted(tenant)}/{quoted(namespace)}"


def ownership(tenant: str, namespace: str, bundle: str) -> str:
    return f"{ownership_folder(tenant, namespace)}/{quoted(bundle)}"


def topics(tenant: str, namespace: str, domain: str) -> str:
    """The folder of a namespace's topics; its children are quoted topic names."""
    return f"{TOPICS}/{quoted(tenant)}/{quoted(namespace)}/{quoted(domain)}"


def topic(tenant: str, namespace: str, domain: str, name: str) -> str:
    return f"{topics(tenant, namespace, domain)}/{quoted(name)}"


def deleted_topic(full_name: str) -> str:
    """The path of a topic's tombstone. All tombstones are in one folder, so that the sweeper lists
    them with one request."""
    return f"{DELETED_TOPICS}/{quoted(full_name)}"


def partitioned_topics(tenant: str, namespace: str, domain: str) -> str:
    """The folder of a namespace's partitioned topics; its children are quoted topic names."""
    return f"{PARTITIONED_TOPICS}/{quoted(tenant)}/{quoted(namespace)}/{quoted(domain)}"


def partitioned_topic(tenant: str, namespace: str, domain: str, name: str) -> str:
    return f"{partitioned_topics(tenant, namespace, domain)}/{quoted(name)}"


def schemas_folder(tenant: str, namespace: str) -> str:
    return f"{SCHEMAS}/{quoted(tenant)}/{quoted(namespace)}"


def schema(tenant: str, namespace: str, topic: str) -> str:
    """The path of a topic's schema. `topic` has no partition number: all partitions share the
    schema."""
    return f"{schemas_folder(tenant, namespace)}/{quoted(topic)}"


_PLAIN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.~-]*").fullmatch
"""Matches a name that needs no encoding."""


def quoted(name: str) -> str:
    """One path component for any name that is not empty; `unquoted` returns the name."""
    if _PLAIN(name):  # the usual case, ten times as fast
        return name
    assert name, "an empty name has no path"
    encoded = quote(name, safe="")
    # "." and ".." mean something in a path.
    return encoded.replace(".", "%2E") if encoded.strip(".") == "" else encoded


def unquoted(component: str) -> str:
    return unquote(component, errors="strict")


def _levels(ledger_id: LedgerId) -> str:
    assert 0 <= ledger_id <= LEDGER_ID_MAX, ledger_id
    high = f"{ledger_id // 10**12:04}"
    middle = f"{ledger_id // 10**8 % 10**4:04}"
    low = f"{ledger_id // 10**4 % 10**4:04}"
    return f"{high}/{middle}/{low}/{ledger_id}"
