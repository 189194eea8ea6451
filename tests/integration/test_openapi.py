"""Requests drawn from the OpenAPI document: no 5xx, and every answer is one that is documented.

Most requests name the topic and subscription that exist, to get beyond "not found".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from fakes.standalone_process import StandaloneProcess
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
KNOWN = {
    "domain": "persistent",
    "tenant": "public",
    "namespace": "default",
    "topic": "t",
    "subscription": "s",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [3, pytest.param(10, marks=pytest.mark.night)])
def test_every_answer_is_one_that_is_documented(tmp_path: Path, examples: int) -> None:
    """`examples`: the number for each operation; there are some 200."""
    server = StandaloneProcess(tmp_path)
    try:
        server.start()
        failures = list(undocumented(f"http://localhost:{server.http_port}", examples))
        assert not failures, "\n\n".join(failures)
        assert server.health()[0] == 200
    finally:
        server.end()


def undocumented(url: str, examples: int) -> list[str]:
    document = httpx.get(f"{url}/openapi.json", timeout=60.0).json()
    schema = schemathesis.openapi.from_dict(document)
    failures: dict[str, str] = {}
    with httpx.Client(base_url=url, timeout=30.0) as client:
        for found in schema.get_all_operations():
            topic = "/admin/v2/persistent/public/default/t"
            client.put(topic)
            client.put(f"{topic}/subscription/s")
            _try(found.ok(), url, examples, failures)
    return list(failures.values())


def _try(operation: Any, url: str, examples: int, failures: dict[str, str]) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(case=operation.as_strategy(), known=st.integers(0, 3))
    def run(case: Any, known: int) -> None:
        if known:
            for name in case.path_parameters.keys() & KNOWN.keys():
                case.path_parameters[name] = KNOWN[name]
        answer = case.call(base_url=url, allow_redirects=False, timeout=10)
        try:
            case.validate_response(answer, checks=CHECKS)
        except FailureGroup as error:
            title = f"{operation.method.upper()} {operation.path} {answer.status_code}"
            failures.setdefault(title, f"{title}\n{error}")

    run()
