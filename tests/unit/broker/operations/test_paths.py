"""Names of topics and subscriptions in paths: slashes, the names of actions, blanks."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to

from magnetar.protos import pulsar_pb2 as pb

pytestmark = pytest.mark.real_loop

T = "public/default/t"
EARLIEST = {"ledgerId": -1, "entryId": -1}


@pytest.mark.parametrize(
    "name",
    ["a/skip", "a/resetcursor", "a/expireMessages", "a/position", "a/skip/1", "a/explain", "a%2Fb"],
)
async def test_a_name_that_ends_like_an_action_is_one_name(name: str) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        one = f"{T}/subscription/{quote(name, safe='')}"
        for other in ("a", "a/b", "a/skip", name):
            await admin.put(f"{T}/subscription/{quote(other, safe='')}")
        await client.produce("t")
        await client.publish()
        await client.expect(pb.CommandSendReceipt)
        explained = await admin.get(f"{one}/explain")
        assert explained.json()["subscription"] == name
        assert (await admin.get(f"{one}/position/1")).status_code == 200
        for path, body in (
            ("resetcursor/1", None),
            ("resetcursor", EARLIEST),
            ("expireMessages/999", None),
            ("expireMessages", EARLIEST),
            ("skip_all", None),
        ):
            answer = await admin.post(f"{one}/{path}", json=body)
            assert answer.status_code == 204, (path, answer.text)
        stats = (await admin.get(f"{T}/stats")).json()["subscriptions"]
        assert {it: found["msgBacklog"] for it, found in stats.items()} == {
            it: int(it != name) for it in ("a", "a/b", "a/skip", name)
        }
        assert (await admin.delete(one)).status_code == 204
        assert name not in (await admin.get(f"{T}/subscriptions")).json()


@pytest.mark.parametrize("name", ["s%0A", "s%2F", "%2Fs", "s%2500"])
async def test_a_name_with_strange_characters_is_not_that_of_another_subscription(
    name: str,
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/subscription/s")
        assert (await admin.delete(f"{T}/subscription/{name}")).status_code == 404
        assert (await admin.post(f"{T}/subscription/{name}/skip_all")).status_code == 404
        assert (await admin.get(f"{T}/subscriptions")).json() == ["s"]


async def test_a_name_with_plain_slashes_is_accepted() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        assert (await admin.put(f"{T}/subscription/a/b")).status_code == 204
        assert (await admin.post(f"{T}/subscription/a/b/skip_all")).status_code == 204
        assert (await admin.get(f"{T}/subscriptions")).json() == ["a/b"]


async def test_an_encoded_action_of_a_partitioned_topic_is_for_one_partition() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=2)
        await admin.put(f"{T}/subscription/s")
        for path in ("s/skip/1", "s/%73kip/1"):
            assert (await admin.post(f"{T}/subscription/{path}")).status_code == 405
        every = "a%2Fskip"
        assert (await admin.put(f"{T}/subscription/{every}")).status_code == 204
        assert (await admin.post(f"{T}/subscription/{every}/skip_all")).status_code == 204
        assert (await admin.delete(f"{T}/subscription/{every}")).status_code == 204


async def test_the_slashes_of_a_topic_are_not_parts_of_the_path() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/subscription/s")
        for path in (f"{T}%2Fsubscription%2Fs", f"{T}/subscription%2Fs", f"{T}%2Funload"):
            refused = await admin.delete(path)
            assert refused.status_code == 404
            assert path in refused.json()["reason"]
        assert (await admin.get(f"{T}/subscriptions")).json() == ["s"]


async def test_a_slash_at_the_end_has_no_meaning() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        assert (await admin.put("public/default/50%2541/")).status_code == 204
        one = "public/default/50%2541/subscription/s"
        assert (await admin.put(f"{one}/")).status_code == 204
        assert (await admin.post(f"{one}/skip_all/")).status_code == 204
        assert (await admin.put("public/default/p/partitions/", json=2)).status_code == 204
        assert (await admin.put("public/default/p/subscription/s/")).status_code == 204
        for topic in ("50%2541", "p"):
            found = await admin.get(f"public/default/{topic}/subscriptions/")
            assert found.json() == ["s"]
        topics = (await admin.get("public/default/")).json()
        assert "persistent://public/default/50%41" in topics


@pytest.mark.parametrize("end", ["", "/", "//"])
async def test_a_slash_at_the_end_does_not_pass_an_action_on_to_all_partitions(end: str) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=2)
        await admin.put(f"{T}/subscription/s")
        await client.produce("t-partition-0")
        await client.publish()
        receipt = await client.expect(pb.CommandSendReceipt)
        last = {"ledgerId": receipt.message_id.ledgerId, "entryId": receipt.message_id.entryId}
        refused = {
            (method, path): await admin.request(
                method, f"{T}/subscription/s/{path}{end}", json=body
            )
            for method, path, body in (
                ("POST", "skip/1", None),
                ("POST", "resetcursor", last),
                ("POST", "expireMessages", last),
                ("GET", "position/1", None),
            )
        }
        stats = (await admin.get(f"{T}/partitioned-stats")).json()
        assert stats["subscriptions"]["s"]["msgBacklog"] == 1
        if end == "//":  # a name with a slash at its end, with which no action is chosen
            assert all(400 <= answer.status_code < 500 for answer in refused.values())
        else:
            assert {answer.status_code for answer in refused.values()} == {405}
            assert {answer.json()["error"] for answer in refused.values()} == {"IsPartitioned"}


@pytest.mark.parametrize("end", ["", "/"])
async def test_a_slash_at_the_end_of_a_request_about_all_partitions(end: str) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=2)
        await admin.put(f"{T}/subscription/s")
        none = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
        for method, path, status in (
            ("POST", "subscription/s/expireMessages/5", 204),
            ("POST", "all_subscription/expireMessages/5", 204),
            ("DELETE", "truncate", 204),
            ("PUT", "unload", 204),
            ("POST", "terminate", 200),
        ):
            answer = await admin.request(method, f"{T}/{path}{end}")
            assert answer.status_code == status, (path, answer.text)
        assert answer.json() == {"0": none, "1": none}


async def test_a_plus_sign_is_a_blank_as_in_paths_of_java_tools() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        assert (await admin.put("public/default/a+b%2Bc")).status_code == 204
        topics = (await admin.get("public/default")).json()
        assert topics == ["persistent://public/default/a b+c"]
        assert (await admin.put("public/default/p+q/partitions", json=1)).status_code == 204
        for topic in ("a+b%2Bc", "p+q"):
            one = f"public/default/{topic}/subscription"
            assert (await admin.put(f"{one}/x+y%2Bz")).status_code == 204
            assert (await admin.get(f"{one}s")).json() == ["x y+z"]
            assert (await admin.delete(f"{one}/x+y%2Bz")).status_code == 204
