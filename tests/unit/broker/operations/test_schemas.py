"""Schemas over the admin API and the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fakes.admin import admin_of
from fakes.admin_port import broker as admin_port
from fakes.admin_port import invoke
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to

from magnetar.broker.schemas.schema import SCHEMA_BYTES_MAX
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

PATH = "schemas/public/default/t"


def avro(*optional: str, required: str = "x") -> dict[str, Any]:
    fields: list[Any] = [{"name": required, "type": "string"}]
    fields += [{"name": it, "type": ["null", "string"], "default": None} for it in optional]
    return {"type": "AVRO", "schema": json.dumps({"type": "record", "name": "R", "fields": fields})}


@pytest.mark.real_loop
async def test_the_life_of_a_schema() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        assert (await admin.get(f"{PATH}/schema")).status_code == 404
        assert (await admin.post(f"{PATH}/schema", json=avro())).json() == {"version": 0}
        assert (await admin.post(f"{PATH}/schema", json=avro("a"))).json() == {"version": 1}
        assert (await admin.post(f"{PATH}/version", json=avro())).json() == {"version": 0}
        null = {**avro(), "properties": None}
        assert (await admin.post(f"{PATH}/version", json=null)).json() == {"version": 0}
        found = (await admin.get(f"{PATH}/schema")).json()
        assert found.pop("timestamp") > 0
        assert found == {
            "version": 1,
            "type": "AVRO",
            "data": avro("a")["schema"],
            "properties": {},
        }
        assert (await admin.get(f"{PATH}/schema/0")).json()["data"] == avro()["schema"]
        assert (await admin.get(f"{PATH}/schema/7")).status_code == 404
        listed = (await admin.get(f"{PATH}/schemas")).json()["getSchemaResponses"]
        assert [it["version"] for it in listed] == [0, 1]

        wrong = avro(required="y")
        refused = await admin.post(f"{PATH}/schema", json=wrong)
        assert (refused.status_code, refused.json()["error"]) == (409, "IncompatibleSchema")
        verdict = await admin.post(f"{PATH}/compatibility", json=wrong)
        assert verdict.json() == {"isCompatibility": False, "schemaCompatibilityStrategy": "FULL"}
        await admin.post(
            "namespaces/public/default/schemaCompatibilityStrategy", json="ALWAYS_COMPATIBLE"
        )
        assert (await admin.post(f"{PATH}/compatibility", json=wrong)).json()["isCompatibility"]

        assert (await admin.delete(f"{PATH}/schema")).json() == {"version": 2}
        assert (await admin.get(f"{PATH}/schemas")).status_code == 404
        assert (await admin.delete(f"{PATH}/schema")).status_code == 404
        assert (await admin.post(f"{PATH}/schema", json=wrong)).json() == {"version": 3}
        assert (await admin.delete(f"{PATH}/schema?force=true")).json() == {"version": 3}
        assert (await admin.get(f"{PATH}/schema/0")).status_code == 404


@pytest.mark.real_loop
async def test_key_value_schemas_are_one_json_object() -> None:
    value = json.loads(avro()["schema"])
    body = {
        "type": "KEY_VALUE",
        "schema": json.dumps({"key": "", "value": value}),
        "properties": {"key.schema.type": "STRING", "value.schema.type": "AVRO"},
    }
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        assert (await admin.post(f"{PATH}/schema", json=body)).status_code == 200
        found = (await admin.get(f"{PATH}/schema")).json()
        assert json.loads(found["data"]) == {"key": "", "value": value}


@pytest.mark.real_loop
async def test_key_value_schema_of_a_client_is_shown_also_if_a_part_is_not_text() -> None:
    parts = {"key.schema.type": "BYTES", "value.schema.type": "STRING"}
    data = b"".join(len(it).to_bytes(4) + it for it in (b"k", b"\xff"))
    schema = pb.Schema(
        name="kv",
        schema_data=data,
        type=pb.Schema.KeyValue,
        properties=[pb.KeyValue(key=key, value=value) for key, value in parts.items()],
    )
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker, "/admin/v2") as admin,
    ):
        await client.produce("t", schema=schema)
        found = await admin.get(f"{PATH}/schema")
        assert found.status_code == 200
        assert json.loads(found.json()["data"]) == {"key": "k", "value": "\ufffd"}


@pytest.mark.real_loop
async def test_a_definition_of_the_largest_size_can_be_uploaded() -> None:
    fields = [{"name": f"f{number:04}", "type": "string"} for number in range(3_500)]
    definition = json.dumps({"type": "record", "name": "R", "fields": fields})
    assert 0.95 * SCHEMA_BYTES_MAX < len(definition) <= SCHEMA_BYTES_MAX
    body = {"type": "AVRO", "schema": definition}
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        assert (await admin.post(f"{PATH}/schema", json=body)).json() == {"version": 0}


@pytest.mark.real_loop
async def test_a_new_namespace_finds_no_schema_of_a_deleted_one() -> None:
    path = "schemas/public/other/t"
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        await admin.put("namespaces/public/other")
        assert (await admin.post(f"{path}/schema", json=avro())).json() == {"version": 0}
        assert (await admin.delete("namespaces/public/other")).status_code == 204
        await admin.put("namespaces/public/other")
        assert (await admin.get(f"{path}/schema/0")).status_code == 404


@pytest.mark.real_loop
async def test_bad_bodies_are_refused_by_name() -> None:
    bodies: list[tuple[dict[str, Any], int, str]] = [
        ({"type": "AVRO", "schema": "{}"}, 422, "not a valid AVRO schema"),
        ({"type": "CSV", "schema": ""}, 400, "expected one of"),
        ({"schema": ""}, 400, "lacks type"),
        ({"type": "KEY_VALUE", "schema": "5"}, 422, "keys 'key' and 'value'"),
        ({"type": "AUTO_CONSUME"}, 422, "cannot be stored"),
        ({"type": "KEY_VALUE", "schema": r'{"key": "\ud800", "value": ""}'}, 422, "Unicode"),
        ({"type": "AVRO", "schema": "\ud800"}, 400, "schema"),
        ({"type": "STRING", "properties": {"a": "\ud800"}}, 400, "properties"),
        ({"type": "STRING", "properties": dict.fromkeys(map(str, range(257)), 1)}, 400, "257"),
        ({"type": "STRING", "properties": {"\ud800": "a"}}, 400, "properties"),
    ]
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        for body, status, why in bodies:
            headers = {"content-type": "application/json"}
            answer = await admin.post(f"{PATH}/schema", content=json.dumps(body), headers=headers)
            assert answer.status_code == status, answer.text
            assert why in answer.json()["reason"]
        missing = await admin.post("schemas/public/none/t/schema", json=avro())
        assert missing.status_code == 404


def test_the_command_line_asks_the_broker(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(avro()))
    path = f"/admin/v2/{PATH}"
    with admin_port() as broker:
        broker.answer(f"{path}/schema", {"version": 4})
        broker.answer(f"{path}/schema/2", {"version": 2})
        broker.answer(f"{path}/schemas", {"getSchemaResponses": []})
        broker.answer(f"{path}/schema?force=true", {"version": 4})
        verdict = {"isCompatibility": False, "schemaCompatibilityStrategy": "FULL"}
        broker.answer(f"{path}/compatibility", verdict)
        said = [
            invoke(broker.url, "schemas", *words)
            for words in (
                ("get", "t"),
                ("get", "t", "--version", "2"),
                ("get", "t", "--all-version"),
                ("upload", "t", "--filename", str(file)),
                ("delete", "non-persistent://public/default/t", "--force"),
                ("compatibility", "t", "-f", str(file)),
            )
        ]
        assert [code for code, _, _ in said] == [0, 0, 0, 0, 0, 1]
        assert [asked[:2] for asked in broker.asked] == [
            ("GET", f"{path}/schema"),
            ("GET", f"{path}/schema/2"),
            ("GET", f"{path}/schemas"),
            ("POST", f"{path}/schema"),
            ("DELETE", f"{path}/schema?force=true"),
            ("POST", f"{path}/compatibility"),
        ]
        assert "has version 4" in said[3][1]
        assert "incompatible by strategy FULL" in said[5][1]


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ([], "type, schema"),
        ({"schema": "{}"}, "type"),
        ({"type": None, "schema": "{}"}, "type"),
        ({"type": "AVRO", "schema": {}}, "schema"),
    ],
)
def test_the_error_of_a_schema_file_names_the_wrong_members(
    tmp_path: Path, content: object, wrong: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(content))
    code, _, errors = invoke("http://127.0.0.1:1", "schemas", "upload", "t", "-f", str(file))
    assert code == 2
    assert errors.endswith(f"missing or no string: {wrong}\n")
