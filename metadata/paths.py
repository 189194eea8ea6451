"""Where everything lies in the metadata store. Pure; the only module that spells a path.

    /cluster                                             the cluster's id
    /ledgers/next-id                                     counter (ids.py)
    /ledgers/meta/<id / 10^12>/<… / 10^8>/<… / 10^4>/<id>   LedgerMetadata
    /bookies/cookies/<bookie>                            BookieCookie
    /bookies/available/<bookie>                          BookieRegistration, ephemeral
    /brokers/available/<broker>                          BrokerRegistration, ephemeral
    /brokers/leader                                      the leader's BrokerId, ephemeral
    /bundles/<tenant>/<namespace>                        NamespaceBundles
    /ownership/<tenant>/<namespace>/<bundle>             Ownership
    /topics/<tenant>/<namespace>/<domain>/<topic>        TopicRecord

What users named is percent-encoded (UTF-8), so that any name is one component that ZooKeeper takes.
"""

from typing import Final
from urllib.parse import quote, unquote

from magnetar.metadata.model import LEDGER_ID_MAX, BookieId, BrokerId, LedgerId

CLUSTER: Final = "/cluster"
NEXT_LEDGER_ID: Final = "/ledgers/next-id"
LEDGERS: Final = "/ledgers/meta"
BOOKIE_COOKIES: Final = "/bookies/cookies"
BOOKIES_AVAILABLE: Final = "/bookies/available"
BROKERS_AVAILABLE: Final = "/brokers/available"
BROKER_LEADER: Final = "/brokers/leader"
BUNDLES: Final = "/bundles"
OWNERSHIP: Final = "/ownership"
TOPICS: Final = "/topics"


def ledger(ledger_id: LedgerId) -> str:
    """Levels of four decimal digits: at most 10,000 children in each folder below the first."""
    assert 0 <= ledger_id <= LEDGER_ID_MAX, ledger_id
    high = f"{ledger_id // 10**12:04}"
    middle = f"{ledger_id // 10**8 % 10**4:04}"
    low = f"{ledger_id // 10**4 % 10**4:04}"
    return f"{LEDGERS}/{high}/{middle}/{low}/{ledger_id}"


def ledger_of(path: str) -> LedgerId:
    """The inverse of `ledger`, also for the last component alone."""
    return LedgerId(int(path.rpartition("/")[2]))


def bookie_cookie(bookie: BookieId) -> str:
    return f"{BOOKIE_COOKIES}/{quoted(bookie)}"


def bookie_available(bookie: BookieId) -> str:
    return f"{BOOKIES_AVAILABLE}/{quoted(bookie)}"


def broker_available(broker: BrokerId) -> str:
    return f"{BROKERS_AVAILABLE}/{quoted(broker)}"


def bundles(tenant: str, namespace: str) -> str:
    return f"{BUNDLES}/{quoted(tenant)}/{quoted(namespace)}"


def ownership(tenant: str, namespace: str, bundle: str) -> str:
    return f"{OWNERSHIP}/{quoted(tenant)}/{quoted(namespace)}/{quoted(bundle)}"


def topics(tenant: str, namespace: str, domain: str) -> str:
    """The folder of a namespace's topics; its children are quoted topic names."""
    return f"{TOPICS}/{quoted(tenant)}/{quoted(namespace)}/{quoted(domain)}"


def topic(tenant: str, namespace: str, domain: str, name: str) -> str:
    return f"{topics(tenant, namespace, domain)}/{quoted(name)}"


def quoted(name: str) -> str:
    """One path component for any name that is not empty; `unquoted` gives the name back."""
    assert name, "an empty name has no path"
    encoded = quote(name, safe="")
    # "." and ".." mean something in a path.
    return encoded.replace(".", "%2E") if encoded.strip(".") == "" else encoded


def unquoted(component: str) -> str:
    return unquote(component, errors="strict")
