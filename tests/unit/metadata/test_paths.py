"""The paths of records. Any name is one component of a path."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata import paths
from magnetar.metadata.model import LEDGER_ID_MAX, BookieId, BrokerId, LedgerId
from magnetar.metadata.node import check_path

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_each_record_has_its_documented_path() -> None:
    assert paths.ledger(LedgerId(0)) == "/ledgers/meta/0000/0000/0000/0"
    assert paths.ledger(LedgerId(12345)) == "/ledgers/meta/0000/0000/0001/12345"
    assert paths.ledger(LedgerId(1_2345_6789_0123)) == "/ledgers/meta/0001/2345/6789/1234567890123"
    assert paths.bookie_cookie(BookieId("b:1")) == "/bookies/cookies/b%3A1"
    assert paths.bookie_available(BookieId("b")) == "/bookies/available/b"
    assert paths.bookie_draining(BookieId("b")) == "/bookies/draining/b"
    marked = paths.under_replicated(LedgerId(12345))
    assert marked == "/ledgers/under-replicated/0000/0000/0001/12345"
    assert paths.repair_lock(LedgerId(12345)) == "/ledgers/repair-locks/12345"
    assert paths.broker_available(BrokerId("b")) == "/brokers/available/b"
    assert paths.tenant("public") == "/tenants/public"
    assert paths.namespace("public", "default") == "/namespaces/public/default"
    assert paths.topic_policies_folder("public", "default") == "/topic-policies/public/default"
    assert (
        paths.topic_policies("public", "default", "persistent", "a b")
        == "/topic-policies/public/default/persistent%2Fa%20b"
    )
    assert (
        paths.ownership("public", "default", "0x00000000_0x40000000")
        == "/ownership/public/default/0x00000000_0x40000000"
    )
    assert (
        paths.topic("public", "default", "persistent", "a/b c")
        == "/topics/public/default/persistent/a%2Fb%20c"
    )
    assert (
        paths.partitioned_topic("public", "default", "persistent", "a b")
        == "/partitioned-topics/public/default/persistent/a%20b"
    )


@given(names)
def test_any_name_is_encoded_as_one_component_and_decoded(name: str) -> None:
    path = paths.topic("t", "n", "persistent", name)
    check_path(path)
    assert path.isascii()
    folder, _, component = path.rpartition("/")
    assert folder == paths.topics("t", "n", "persistent")
    assert paths.unquoted(component) == name


def test_a_name_of_dots_is_encoded() -> None:
    for name in (".", "..", "..."):
        check_path(paths.bookie_cookie(BookieId(name)))
        assert paths.unquoted(paths.quoted(name)) == name
    assert paths.quoted("a.b") == "a.b"


@given(st.sets(st.integers(0, LEDGER_ID_MAX), max_size=20))
def test_each_ledger_has_its_own_path(ledgers: set[int]) -> None:
    found = {paths.ledger(LedgerId(ledger)) for ledger in ledgers}
    assert len(found) == len(ledgers)
    assert {LedgerId(int(path.rpartition("/")[2])) for path in found} == ledgers


def test_a_folder_holds_ten_thousand_ledgers() -> None:
    folder = paths.ledger(LedgerId(20_000)).rpartition("/")[0]
    assert paths.ledger(LedgerId(29_999)).rpartition("/")[0] == folder
    assert paths.ledger(LedgerId(30_000)).rpartition("/")[0] != folder
    assert paths.ledger(LedgerId(19_999)).rpartition("/")[0] != folder
