"""The control app of a running front, with echo ranks behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc

from tests.waiting import PATIENCE
from tokenspeed.runtime.config import Config, ModelOptions, ReloadOptions, ServeOptions

MODEL = ModelOptions(model="echo")
PERMITTED = Config(model=MODEL, reload=ReloadOptions(allow_reload_forward=True))


@pytest.fixture
def front(start_front: Callable[..., Any]) -> Any:
    return start_front(PERMITTED, step_seconds=0.002).until_ready()


@pytest.fixture
async def control(front: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as client:
        yield client


async def test_a_reload_is_passed_on_and_its_reply_given_back(control: httpx.AsyncClient, front: Any) -> None:
    body = {"id": "a", "mode": "abort", "modules": ["m.one"], "timeout_s": 5, "by": "me"}
    reply = await control.post("/reload_forward", json=body)
    assert reply.status_code == 200
    assert reply.json() == {
        "success": True,
        "id": "a",
        "generation": 2,
        "message": "reloaded",
        "seconds": {"drain": 0.0, "read": 0.01, "total": 0.02},
    }
    (passed,) = front.received("Reload")
    assert {name: passed[name] for name in body} == body

    again = await control.post("/reload_forward", json={"id": "a"})
    assert again.json() == reply.json()
    assert len(front.received("Reload")) == 1

    status = (await control.get("/reload_status")).json()
    assert (status["state"], status["generation"], status["last"]) == ("idle", 2, reply.json())
    metrics = (await control.get("/metrics")).text
    assert 'tokenspeed:reloads_total{model_name="echo",result="success"} 1.0' in metrics


async def test_a_failed_reload_is_a_400(control: httpx.AsyncClient) -> None:
    reply = await control.post("/reload_forward", json={"id": "a", "modules": ["no.such"]})
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "nonsense", ""])
async def test_the_content_type_does_not_matter(control: httpx.AsyncClient, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    reply = await control.post("/reload_forward", content=b'{"id": "a"}', headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"\x80\x04K\x01.",
        b"{}",
        b'{"mode": "wait"}',
        b'{"id": 5}',
        b'{"id": ""}',
        b'{"id": null}',
        b'{"id": "a", "mode": "now"}',
        b'{"id": "a", "timeout_s": 0}',
        b'{"id": "a", "timeout_s": -1}',
        b'{"id": "a", "timeout_s": "600"}',
        b'{"id": "a", "timeout_s": true}',
        b'{"id": "a", "modules": "m"}',
        b'{"id": "a", "modules": [1]}',
        b'{"id": "a", "modules": []}',
        b'{"id": "a", "by": 1}',
        b'{"id": "a", "module": ["m"]}',
    ],
)
async def test_a_bad_body_is_refused_and_reaches_no_rank(
    shared_control: httpx.AsyncClient, shared_front: Any, body: bytes
) -> None:
    reply = await shared_control.post("/reload_forward", content=body)
    answer = reply.json()
    assert (reply.status_code, answer["success"], answer["code"]) == (400, False, "bad_request")
    assert (answer["phase"], answer["rank"]) == ("queue", None)
    assert answer["error"] == answer["message"] != ""
    assert shared_front.received("Reload") == []


async def test_without_the_flag_a_reload_is_refused_before_its_body_is_looked_at(
    start_front: Callable[..., Any],
) -> None:
    front = start_front(Config(model=MODEL)).until_ready()
    async with httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as control:
        for body in (b'{"id": "a"}', b"{"):
            reply = await control.post("/reload_forward", content=body)
            assert (reply.status_code, reply.json()["code"]) == (400, "not_enabled")
            assert "--allow-reload-forward" in reply.json()["error"]
    assert front.received("Reload") == []


async def test_while_the_ranks_are_busy_the_front_answers_and_a_lost_caller_changes_nothing(
    start_front: Callable[..., Any],
) -> None:
    front = start_front(PERMITTED, reload_waits=True).until_ready()
    async with httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as control:
        caller = asyncio.create_task(control.post("/reload_forward", json={"id": "a", "by": "me"}))
        status: dict[str, Any] = {"state": ""}
        while status["state"] != "reading":
            status = (await control.get("/reload_status")).json()
        assert (status["id"], status["by"]) == ("a", "me")
        assert (await control.get("/health")).status_code == 200
        assert (await control.get("/server_info")).status_code == 200

        caller.cancel()
        await asyncio.wait([caller])
        front.let_go()
        reply = await control.post("/reload_forward", json={"id": "a"})
        assert reply.json()["success"]
    assert len(front.received("Reload")) == 1


async def test_pause_holds_requests_and_continue_lets_them_go(
    control: httpx.AsyncClient, front: Any, generate_request: Callable[..., Any]
) -> None:
    assert (await control.post("/pause_generation")).json() == {"success": True, "message": "paused"}
    async with front.channel() as channel:
        call = rpc.TokenSpeedSchedulerStub(channel).Generate(generate_request("hello"))
        reading = asyncio.create_task(call.read())
        assert not (await asyncio.wait([reading], timeout=0.2))[0]
        assert (await control.post("/continue_generation", content=b"ignored")).status_code == 200
        response: pb.GenerateResponse = await reading
        assert response.complete.finish_reason == "stop"
    assert [message["mode"] for message in front.received("Pause")] == ["wait"]


async def test_the_mode_of_a_pause_is_checked(control: httpx.AsyncClient, front: Any) -> None:
    for body in ({"mode": "now"}, {"mode": 1}, {"mod": "abort"}, ["abort"]):
        reply = await control.post("/pause_generation", json=body)
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_request")
    assert not front.received("Pause")
    for mode in ("keep", "abort"):
        assert (await control.post("/pause_generation", json={"mode": mode})).status_code == 200
    assert [message["mode"] for message in front.received("Pause")] == ["keep", "abort"]


async def test_a_huge_body_is_refused(control: httpx.AsyncClient, front: Any) -> None:
    huge = b'{"id": "' + b"a" * (2 << 20) + b'"}'
    for path in ("/reload_forward", "/pause_generation"):
        reply = await control.post(path, content=huge)
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_request")
        assert "larger than 1048576 bytes" in reply.json()["error"]
    assert not front.received("Reload") and not front.received("Pause")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_cache_is_flushed(shared_control: httpx.AsyncClient, method: str) -> None:
    reply = await shared_control.request(method, "/flush_cache")
    assert (reply.status_code, reply.json()) == (200, {"success": True, "message": "flushed"})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/reload_forward", 405),
        ("DELETE", "/flush_cache", 405),
        ("POST", "/health", 405),
    ],
)
async def test_wrong_paths_and_methods_are_answered_in_json(
    shared_control: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    reply = await shared_control.request(method, path)
    assert reply.status_code == status
    assert reply.json()["success"] is False
    assert path in reply.json()["message"]


async def test_a_connection_that_rested_takes_the_next_call(shared_front: Any) -> None:
    """A client's pool may use it again after seconds; it cannot repeat a call that meets a closing connection."""
    limits = httpx.Limits(keepalive_expiry=2 * PATIENCE)
    async with httpx.AsyncClient(base_url=shared_front.control_url, timeout=PATIENCE, limits=limits) as control:
        addresses = []
        for rest in (0.0, 5.5):
            await asyncio.sleep(rest)
            async with control.stream("GET", "/server_info") as reply:
                await reply.aread()
                addresses.append(reply.extensions["network_stream"].get_extra_info("client_addr"))
    assert addresses[0] == addresses[1]


async def test_the_server_tells_about_itself_but_no_secret(start_front: Callable[..., Any]) -> None:
    front = start_front(Config(model=MODEL, serve=ServeOptions(api_key="hush-hush"))).until_ready()
    async with httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as control:
        reply = await control.get("/server_info")
    info = reply.json()
    assert info["server_args"]["rl.control_url"] == front.control_url
    assert info["engine"]["vocab_size"] == 260
    assert "hush-hush" not in reply.text


async def test_before_the_engine_is_ready_health_is_503_and_calls_fail(
    start_front: Callable[..., Any],
) -> None:
    front = start_front(PERMITTED, start="never").until_listening()
    async with httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as control:
        assert (await control.get("/health")).status_code == 503
        assert (await control.get("/server_info")).json()["state"] == "starting"
        for path, body in (("/reload_forward", {"id": "a"}), ("/flush_cache", None)):
            reply = await control.post(path, json=body)
            assert (reply.status_code, reply.json()["code"]) == (400, "failed")
            assert "still starting" in reply.json()["error"]


@pytest.fixture(scope="module")
def shared_front(start_shared_front: Callable[..., Any]) -> Any:
    return start_shared_front(PERMITTED).until_ready()


@pytest.fixture
async def shared_control(shared_front: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_front.control_url, timeout=PATIENCE) as client:
        yield client
