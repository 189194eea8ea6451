"""The admin API: paths, verbs, statuses, and invalid requests."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import httpx
import pytest
from fakes.admin import admin_of
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from fakes.namespaces import create_namespaces
from fakes.wire import wire_to
from fastapi import FastAPI

from magnetar.broker.admin.app import (
    BODY_BYTES_MAX,
    SCHEMA_BODY_BYTES_MAX,
    _document,
    bounded,
    prepared,
)
from magnetar.broker.admin.paths import EncodedNames

pytestmark = pytest.mark.real_loop

T = "public/default/t"


async def get(broker: RunningBroker, path: str) -> httpx.Response:
    async with admin_of(broker) as client:
        return await client.get(f"{path}/stats")


async def test_the_statistics_of_a_topic_count_messages_and_clients() -> None:
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as client:
        await client.produce("t", producer_name="me")
        await client.subscribe("t", "s")
        for number in range(3):
            await client.publish(sequence_id=number)
            await client.receive()
        found = await get(broker, "public/default/t")
        assert found.status_code == 200
        stats = found.json()
        assert stats["msgInCounter"] == 3
        assert [it["producerName"] for it in stats["publishers"]] == ["me"]
        assert stats["subscriptions"]["s"]["msgBacklog"] == 3
        assert stats["managedLedger"]["state"] == "open"


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [("public/default/unknown", 404, "unknown"), ("public/%20/t", 412, "name")],
)
async def test_a_request_for_a_missing_topic_is_refused_and_creates_no_topic(
    path: str, status: int, text: str
) -> None:
    async with running_broker(ClusterState()) as broker:
        found = await get(broker, path)
        assert found.status_code == status
        assert text in found.json()["reason"]
        assert broker.broker.topics == [], "the request created the topic"


@pytest.mark.parametrize(("topic", "quoted"), [("t", "t"), ("a?b#50% ü", "a%3Fb%2350%25%20%C3%BC")])
async def test_a_request_for_another_brokers_topic_is_redirected(topic: str, quoted: str) -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0) as first,
        running_broker(cluster, 1) as second,
        wire_to(first, "pulsar") as client,
    ):
        for number in range(50):
            name = f"persistent://public/n{number}/{topic}"
            await create_namespaces(first.store, f"public/n{number}")
            answer = await client.produce(name, producer_id=number)
            if hasattr(answer, "producer_name"):
                break
        found = await get(second, f"public/n{number}/{quoted}")
        assert found.status_code == 307
        assert found.headers["location"].endswith(f"/persistent/public/n{number}/{quoted}/stats")
        async with admin_of(second) as admin:
            path = f"public/n{number}/{quoted}/subscription/s%2F1"
            found = await admin.delete(path, params={"force": "true"})
            assert found.status_code == 307
            assert found.headers["location"].endswith(f"/persistent/{path}?force=true")
        first.stop.set()
        await asyncio.wait([first.serving])
        assert (await get(second, f"public/n{number}/{quoted}")).status_code == 200


async def test_create_answers_conflict_for_an_existing_topic() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        assert (await admin.put(T)).status_code == 204
        again = await admin.put(T)
        assert again.status_code == 409
        assert again.json()["error"] == "TopicExists"
        assert (await admin.get("public/default")).json() == [f"persistent://{T}"]
        assert (await admin.get("public/other")).status_code == 404


async def test_a_subscription_from_creation_to_deletion() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        one = f"{T}/subscription/a%2Fb"  # slashes are part of the name
        assert (await admin.put(one)).status_code == 204, "the request creates the topic, too"
        assert (await admin.put(one)).status_code == 409
        assert (await admin.get(f"{T}/subscriptions")).json() == ["a/b"]
        assert (await admin.post(f"{one}/resetcursor/0")).status_code == 204
        earliest = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "isExcluded": False}
        assert (await admin.post(f"{one}/resetcursor", json=earliest)).status_code == 204
        assert (await admin.delete(one)).status_code == 204
        assert (await admin.delete(one)).status_code == 404
        assert (await admin.get(f"{T}/subscriptions")).json() == []


async def test_delete_of_a_subscription_in_use_needs_force() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await client.subscribe("t", "s")
        refused = await admin.delete(f"{T}/subscription/s")
        assert refused.status_code == 412
        assert refused.json()["reason"] == "subscription 's' has 1 connected consumers"
        deleted = await admin.delete(f"{T}/subscription/s", params={"force": "true"})
        assert deleted.status_code == 204


S = f"{T}/subscription/s"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("GET", "a b/default", None, 412, "invalid namespace name 'a b/default'"),
        ("PUT", f"public/default/{'x' * 2000}", None, 412, "the limit is 1024"),
        ("PUT", "public/default/%20", None, 412, "the topic part is blank"),
        ("PUT", "public/default/a%2Fb", None, 404, "/docs"),
        ("PUT", f"{T}/subscription/%20", None, 400, "expected a name that is not blank"),
        ("PUT", f"{T}/subscription/{'x' * 2000}", None, 400, "at most 1024 bytes, not 2000"),
        ("GET", f"{S}/position/0", None, 400, "invalid position '0': expected greater than"),
        ("GET", f"{S}/position/10001", None, 400, "less than or equal to 10000"),
        ("GET", f"{S}/position/one", None, 400, "invalid position 'one': expected a valid integer"),
        ("GET", f"{S}/position/1", None, 404, "subscription 's' does not exist"),
        ("GET", f"{S}/position/{'9' * 5000}", None, 400, "invalid position"),
        ("POST", f"{S}/resetcursor/-1", None, 400, "invalid timestamp '-1'"),
        ("POST", f"{S}/resetcursor/{1 << 63}", None, 400, "invalid timestamp"),
        ("POST", f"{S}/resetcursor/0", None, 404, "subscription 's' does not exist"),
        ("POST", f"{S}/resetcursor", None, 400, "the request lacks request body"),
        ("POST", f"{S}/resetcursor", b"{", 400, "the request body is not JSON"),
        ("POST", f"{S}/resetcursor", b"[]", 400, "invalid request body"),
        ("POST", f"{S}/resetcursor", b'{"ledgerId": 1}', 400, "the request lacks entryId"),
        ("POST", f"{S}/resetcursor", b'{"ledgerId": -1, "entryId": 3}', 400, "both -1"),
        ("POST", f"{S}/resetcursor", b'{"ledgerId": 1e99, "entryId": 3}', 400, "ledgerId"),
        ("DELETE", f"{S}?force=perhaps", None, 400, "invalid force 'perhaps'"),
        ("PATCH", T, None, 405, "Method Not Allowed"),
        ("GET", "nowhere", None, 404, "/docs"),
    ],
)
async def test_an_invalid_request_is_refused_with_the_expected_form(
    method: str, path: str, body: bytes | None, status: int, reason: str
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(T)
        headers = {} if body is None else {"content-type": "application/json"}
        answer = await admin.request(method, path, content=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert reason in answer.json()["reason"]
        assert len(answer.content) < 4_000, "a hostile value is not sent back whole"


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("retention", b'{"x": 2}', "the request lacks retentionTimeInMinutes"),
        ("messageTTL", b'"x"', "invalid request body 'x': expected a valid integer"),
        ("messageTTL", b"NaN", "invalid request body nan: expected a finite number"),
        ("subscriptionTypesEnabled", b"[]", "[]: expected a list with at least 1 item"),
        ("inactiveTopicPolicies", b"[]", "invalid request body []: expected a valid dictionary"),
        ("publishRate", b'{"x": 2}', "invalid x 2: expected no field of this name"),
        ("publishRate", b'{"%b": 2}' % (b"x" * 9_000), "xxx 2: expected no field of this name"),
        (
            "retention",
            b'{"retentionTimeInMinutes": 1, "retentionSizeInMB": 0}',
            "invalid request body: retentionTimeInMinutes 1 and retentionSizeInMB 0",
        ),
    ],
)
async def test_the_error_of_a_wrong_body_says_what_was_expected(
    path: str, body: bytes, reason: str
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        headers = {"content-type": "application/json"}
        refused = await admin.post(
            f"namespaces/public/default/{path}", content=body, headers=headers
        )
        assert refused.status_code == 400, refused.text
        assert reason in refused.json()["reason"]
        assert len(refused.content) < 1_000, "a hostile value is not sent back whole"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"retentionTimeInMinutes": 0}, "the request lacks retention_policies.retentionSizeInMB"),
        (
            {"retentionTimeInMinutes": "x", "retentionSizeInMB": 0},
            "invalid retention_policies.retentionTimeInMinutes 'x': expected a valid integer",
        ),
        (
            {"retentionTimeInMinutes": 1, "retentionSizeInMB": 0},
            "invalid retention_policies: retentionTimeInMinutes 1 and retentionSizeInMB 0",
        ),
    ],
)
async def test_the_error_of_a_new_namespace_says_what_was_expected(
    body: dict[str, object], reason: str
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        refused = await admin.put("namespaces/public/n", json={"retention_policies": body})
        assert refused.status_code == 400, refused.text
        assert refused.json()["reason"].startswith(reason)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("many", 400, "invalid partitions 'many': expected a valid integer"),
        ({"partitions": "many"}, 400, "invalid partitions 'many': expected a valid integer"),
        ({}, 400, "the request lacks partitions"),
        (-1, 406, "-1"),
        ({"partitions": -1}, 406, "-1"),
        (1 << 64, 406, str(1 << 64)),
        ({"partitions": 3, "properties": None, "deleted": False}, 204, ""),
    ],
)
async def test_the_number_of_partitions_has_two_forms(
    body: object, status: int, reason: str
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        answer = await admin.put(f"{T}/partitions", json=body)
        assert answer.status_code == status, answer.text
        assert reason in answer.text


@pytest.mark.parametrize("properties", [b'{"\\udc00": ""}', b'{"": "\\ud800"}'])
async def test_properties_must_be_unicode(properties: bytes) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        headers = {"content-type": "application/json"}
        for path, start in (
            (f"{T}/partitions", b'"partitions": 1'),
            (f"{T}/subscription/s", b'"ledgerId": -1, "entryId": -1'),
        ):
            body = b'{%b, "properties": %b}' % (start, properties)
            refused = await admin.put(path, content=body, headers=headers)
            assert refused.status_code == 400
            assert "unicode" in refused.json()["reason"]


async def test_a_body_of_another_type_is_refused() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        body, headers = b'{"ledgerId": -1, "entryId": -1}', {"content-type": "text/plain"}
        answer = await admin.post(f"{S}/resetcursor", content=body, headers=headers)
        assert answer.status_code == 400
        expected = "the request body must be JSON, with content-type: application/json"
        assert answer.json()["reason"] == expected


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (f"persistent/{S}/resetcursor", {"content-length": str(BODY_BYTES_MAX + 1)}, 413),
        (f"persistent/{S}/resetcursor", {"content-length": "x"}, 413),
        (f"persistent/{S}/resetcursor", {"transfer-encoding": "chunked"}, 411),
        (f"schemas/{T}/schema", {"content-length": str(BODY_BYTES_MAX + 1)}, 400),
        (f"schemas/{T}/schema", {"content-length": str(SCHEMA_BODY_BYTES_MAX + 1)}, 413),
    ],
)
async def test_a_large_body_is_refused_unread(
    path: str, headers: dict[str, str], status: int
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        request = admin.build_request("POST", path, content=b"")
        for name in ("content-length", "transfer-encoding"):
            request.headers.pop(name, None)
        request.headers.update(headers)
        assert (await admin.send(request)).status_code == status


async def test_a_request_that_takes_too_long_is_ended() -> None:
    app = FastAPI()

    @app.get("/")
    async def wait() -> None:
        await asyncio.Event().wait()

    transport = httpx.ASGITransport(app=bounded(app, timeout_s=0.01))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.get("/")
    assert answer.status_code == 503
    assert "took longer than" in answer.json()["reason"]


@pytest.mark.parametrize("path", ["/openapi.json", "/openapi.json/"])
async def test_concurrent_first_requests_get_the_same_whole_document(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    api = FastAPI(redirect_slashes=False)
    api.add_middleware(EncodedNames)

    @api.get("/{number}")
    async def show(number: int) -> int:
        return number

    made, build = threading.Event(), FastAPI.openapi
    asked = threading.Semaphore(0)

    def slow(self: FastAPI) -> dict[str, Any]:
        document = build(self)  # FastAPI keeps it: other requests could see it from now on
        made.set()
        assert asked.acquire(timeout=5)
        return document

    monkeypatch.setattr(FastAPI, "openapi", slow)
    monkeypatch.setattr(api, "openapi", partial(_document, api))
    transport = httpx.ASGITransport(app=prepared(api))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://here") as client,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(client.get(path))
        await asyncio.to_thread(made.wait)
        second = group.create_task(client.get(path))
        await asyncio.sleep(0.05)
        assert not second.done(), "the document is not complete"
        asked.release(9)
    assert "422" not in first.result().json()["paths"]["/{number}"]["get"]["responses"]
    assert second.result().json() == first.result().json()


async def test_the_api_page_needs_no_internet() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, below="") as client:
        page = await client.get("/docs")
        assert page.status_code == 200
        assert "https://" not in page.text
        script = await client.get("/static-offline-docs/swagger-ui-bundle.js")
        assert len(script.content) > 1_000_000
        described = (await client.get("/openapi.json")).json()
    prefix = "/admin/v2/persistent/{tenant}/{namespace}"
    assert described["paths"].keys() >= {
        prefix,
        f"{prefix}/{{topic}}",
        f"{prefix}/{{topic}}/stats",
        f"{prefix}/{{topic}}/internalStats",
        f"{prefix}/{{topic}}/terminate",
        f"{prefix}/{{topic}}/truncate",
        f"{prefix}/{{topic}}/subscriptions",
        f"{prefix}/{{topic}}/subscription/{{subscription}}",
        f"{prefix}/{{topic}}/subscription/{{subscription}}/resetcursor",
        f"{prefix}/{{topic}}/subscription/{{subscription}}/resetcursor/{{timestamp}}",
        f"{prefix}/{{topic}}/subscription/{{subscription}}/position/{{position}}",
    }
    schemas = described["components"]["schemas"]
    assert schemas["WantedPartitions"]["anyOf"][1] == {"type": "integer"}
    for name in ("MessagePosition", "SubscriptionStart"):
        of_object, of_word = schemas[name]["anyOf"]
        assert "ledgerId" in of_object["properties"]
        assert of_word == {"type": "string", "enum": ["earliest", "latest"]}
