# SPDX-License-Identifier: Apache-2.0
"""The endpoint over real connections, with the openai client as it is (M24, M28)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from tandem.agents import endpoint as module
from tandem.agents.chat import ChatReply, ChatRequest, RequestRefused
from tandem.agents.endpoint import Endpoint, check_address, open_endpoint, read_address
from tandem.agents.setup import Access
from tandem.errors import UserError
from tandem.types import FinishReason, ToolCall

USER: Any = [{"role": "user", "content": "q"}]
REPLY = ChatReply("It is 42.", (ToolCall("c1", "look", '{"a": 1}'),), FinishReason.STOP, 5, 3)


class Turn:
    """A turn that is drawn when ``release`` is set."""

    def __init__(self, release: asyncio.Event, error: BaseException | None) -> None:
        self._release, self._error = release, error
        self.marks: list[str] = []

    async def reply(self) -> ChatReply:
        await self._release.wait()
        if self._error is not None:
            raise self._error
        return REPLY

    def confirm(self) -> None:
        self.marks.append("confirmed")

    def hang_up(self) -> None:
        self.marks.append("hung up")


class Session:
    """An episode whose turns are given."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.release.set()
        self.error: BaseException | None = None
        self.chats: list[ChatRequest] = []
        self.turns: list[Turn] = []
        self.refusals: list[str] = []

    def request(self, chat: ChatRequest) -> Turn:
        self.chats.append(chat)
        self.turns.append(Turn(self.release, self.error))
        return self.turns[-1]

    def refuse(self, error: RequestRefused) -> None:
        self.refusals.append(str(error))


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Endpoint, Access, Session]]:
    named: list[str] = []
    async with open_endpoint(("127.0.0.1", 0), name_once=named.append) as endpoint:
        session = Session()
        yield endpoint, endpoint.admit(session), session


def run(test: Callable[[Endpoint, Access, Session], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), serving() as parts:
            await test(*parts)

    asyncio.run(main())


def client_of(access: Access, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, **options
    )


def test_m24_the_openai_client_gets_turns_whole_and_streamed() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        async with client_of(access) as client:
            answer = await client.chat.completions.create(model="any", messages=USER, stop=["END"])
            (choice,) = answer.choices
            assert choice.message.content == "It is 42." and choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None and answer.usage is not None
            assert answer.usage.total_tokens == 8
            stream = await client.chat.completions.create(
                model="any", messages=USER, stream=True, stream_options={"include_usage": True}
            )
            events = [event async for event in stream]
            assert events[0].choices[0].delta.content == "It is 42."
            assert events[-1].usage is not None
            assert [model.id async for model in client.models.list()] == ["policy"]
        assert [chat.stops for chat in session.chats] == [("END",), ()]
        assert [turn.marks for turn in session.turns] == [["confirmed"]] * 2

    run(check)


def test_m24_the_plain_client_works_from_a_thread() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        def ask() -> str | None:
            with openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as client:
                answer = client.chat.completions.create(model="any", messages=USER)
            return answer.choices[0].message.content

        assert await asyncio.to_thread(ask) == "It is 42."

    run(check)


def test_m24_a_client_that_hangs_up_has_not_got_the_turn() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        session.release.clear()
        async with client_of(access, timeout=0.3) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="any", messages=USER)
        while session.turns[0].marks != ["hung up"]:
            await asyncio.sleep(0.01)

    run(check)


def test_a_request_whose_episode_ends_is_closed_without_a_traceback() -> None:
    """The turn is cancelled, as when a program ends without waiting for its request."""

    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        session.error = asyncio.CancelledError()
        for is_streamed in (False, True):
            async with client_of(access) as client:
                with pytest.raises((openai.APIConnectionError, httpx.HTTPError)):
                    answer: Any = await client.chat.completions.create(
                        model="any", messages=USER, stream=is_streamed
                    )
                    _ = [event async for event in answer]
        assert [turn.marks for turn in session.turns] == [["hung up"]] * 2
        await asyncio.sleep(0.1)
        assert not errors

    run(check)


def test_a_stream_says_that_it_waits_and_ends_with_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.02)

    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        session.release.clear()
        session.error = RequestRefused("no logits", status=500)
        headers = {"authorization": f"Bearer {access.api_key}"}
        content = {"messages": USER, "stream": True}
        url = f"{access.base_url}/chat/completions"
        async with (
            httpx.AsyncClient(trust_env=False, timeout=None) as client,
            client.stream("POST", url, json=content, headers=headers) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == ": waiting"
            session.release.set()
            with pytest.raises(httpx.RemoteProtocolError):
                async for line in lines:
                    if line.startswith("data: "):
                        assert json.loads(line[6:])["error"]["message"] == "no logits"
        assert session.turns[0].marks == ["hung up"]

    run(check)


def test_refusals_reach_the_client_and_the_episode() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        async with client_of(access) as client:
            with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
                await client.chat.completions.create(model="any", messages=USER, n=2)
            with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not built"):
                await client.embeddings.create(model="any", input="x")
            session.error = RequestRefused("no logits", status=500)
            with pytest.raises(openai.InternalServerError, match="no logits"):
                await client.chat.completions.create(model="any", messages=USER)
        assert len(session.refusals) == 3

    run(check)


def test_m28_a_request_without_a_key_of_an_episode_is_refused() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        endpoint.close(access)
        async with client_of(access) as client:
            with pytest.raises(openai.AuthenticationError, match="of no episode"):
                await client.chat.completions.create(model="any", messages=USER)
        url = access.base_url[:-3]
        async with httpx.AsyncClient(trust_env=False, timeout=None, base_url=url) as plain:
            assert (await plain.get("/v1/models")).status_code == 401
            assert (await plain.get("/health")).status_code == 200
        assert not session.chats and not session.refusals

    run(check)


def test_head_is_answered_as_get_without_a_body() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        headers = {"authorization": f"Bearer {access.api_key}"}
        url = access.base_url[:-3]
        async with httpx.AsyncClient(trust_env=False, timeout=None, base_url=url) as plain:
            for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/x", 404)):
                got = await plain.get(path, headers=headers)
                head = await plain.head(path, headers=headers)
                assert head.status_code == got.status_code == status and not head.content
                assert head.headers["content-length"] == got.headers["content-length"]
            head = await plain.head("/v1/chat/completions", headers=headers)
            assert head.status_code == 405 and not head.content
            assert (await plain.head("/v1/models")).status_code == 401
        assert not session.chats

    run(check)


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ({"role": ["user"], "content": "x"}, "messages[0] has the role"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls is not a list"),
    ],
)
def test_a_message_of_a_wrong_form_is_refused_by_its_field(message: Any, rule: str) -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        headers = {"authorization": f"Bearer {access.api_key}"}
        url = f"{access.base_url}/chat/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=None) as plain:
            answer = await plain.post(url, json={"messages": [message]}, headers=headers)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(rule)
        assert error["param"] == "messages" and len(session.refusals) == 1

    run(check)


def test_m28_a_large_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1 << 20)

    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        url = f"{access.base_url}/chat/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            answer = await client.post(url, content=b"x" * (1 << 20))
            assert answer.status_code == 401, "its key is read after the body"
            answer = await client.post(url, content=b"x" * ((1 << 20) + 1))
            assert answer.status_code == 413 and "1 MiB" in answer.text

    run(check)


def test_m28_many_episodes_at_once_reach_their_own_sessions() -> None:
    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        sessions = [Session() for _ in range(200)]
        accesses = [endpoint.admit(one) for one in sessions]
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:

            async def ask(one: Access) -> int:
                headers = {"authorization": f"Bearer {one.api_key}"}
                url = f"{one.base_url}/chat/completions"
                return (
                    await client.post(url, json={"messages": USER}, headers=headers)
                ).status_code

            assert set(await asyncio.gather(*map(ask, accesses))) == {200}
        assert all(len(one.chats) == 1 for one in sessions)

    run(check)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("8000", "is not an address of this machine"),
        ("127.0.0.1", "is not HOST:PORT"),
        ("127.0.0.1:99999", "is not HOST:PORT"),
        ("0.0.0.0:8000", "is not an address of this machine alone"),
        ("example.org:8000", "is not an address of this machine alone"),
    ],
)
def test_m28_another_address_is_refused(value: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        read_address(value)


def test_addresses_of_this_machine_are_taken_and_a_port_in_use_is_refused() -> None:
    assert read_address(None) == ("127.0.0.1", 0)
    assert read_address("[::1]:80") == ("::1", 80)

    async def check(endpoint: Endpoint, access: Access, session: Session) -> None:
        port = httpx.URL(access.base_url).port
        assert port is not None
        with pytest.raises(UserError, match=r"endpoint=.*cannot be listened on .*in use"):
            async with open_endpoint(("127.0.0.1", port), name_once=print):
                pass
        with pytest.raises(UserError, match=r"endpoint=.*cannot be listened on .*in use"):
            check_address(("127.0.0.1", port))
        check_address(("127.0.0.1", 0))

    run(check)
