"""Addresses are checked, names are looked up again, and failures keep the last good answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from serve_app.endpoint import Endpoint
from serve_app.errors import PreflightFailed
from serve_app.triton.resolver import EndpointResolver, look_up, parse_target


class Names:
    """A name service that tests change."""

    def __init__(self, **answers: Sequence[str] | Exception) -> None:
        self.answers = dict(answers)
        self.num_lookups = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.num_lookups += 1
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return answer


def addresses(endpoints: Sequence[Endpoint]) -> list[str]:
    return [endpoint.address for endpoint in endpoints]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("triton:8001", "triton:8001"),
        (" 10.0.0.1:8001 ", "10.0.0.1:8001"),
        ("[::1]:8001", "[::1]:8001"),
        ("ipv4:10.0.0.1:8001", "10.0.0.1:8001"),
        ("ipv6:[::1]:8001", "[::1]:8001"),
        ("unix:/run/t.sock:8001", "unix:/run/t.sock:8001"),
        ("unix:///run/t.sock", "unix:/run/t.sock"),
        ("my_host.example.:8001", "my_host.example.:8001"),
    ],
)
def test_static_addresses(text: str, address: str) -> None:
    """Every form that gRPC takes as it is becomes one static endpoint."""
    target = parse_target(text)
    assert target.is_static
    assert target.text == address


@pytest.mark.parametrize(
    "text",
    [
        "", "triton", "triton:", "triton:0", "triton:65536", "triton:http", "http://triton:8000", "grpc://triton:8001",
        ":8001", "::1:8001", "[triton]:8001", "[10.0.0.1]:8001", "unix:", "unix:relative", "unix:/", "dns:///triton",
        "ipv4:triton:8001", "ipv6:[10.0.0.1]:8001", "tri ton:8001", "-x:8001", "triton:٣", "dns://server/triton:8001",
    ],
)  # fmt: skip
def test_malformed_addresses_are_refused(text: str) -> None:
    """Anything else is refused before anything starts, with the accepted forms in the text."""
    with pytest.raises(PreflightFailed, match=r"Write `host:port`"):
        EndpointResolver([text], 1.0, lambda endpoints: None)


async def wait_until(is_true: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not is_true():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), 5)


async def test_static_list_is_told_once() -> None:
    """Static addresses are told on entry, in order and without repeats, and nothing runs afterwards."""
    told: list[list[str]] = []
    async with EndpointResolver(["b:2", "a:1", "b:2"], 0.001, lambda e: told.append(addresses(e))) as resolver:
        await asyncio.sleep(0.01)
        assert told == [["b:2", "a:1"]]
        assert repr(resolver) == "<EndpointResolver b:2, a:1, b:2 | 2 endpoints, 0 names failing>"


async def test_name_is_looked_up_again() -> None:
    """A name's addresses, both families, become endpoints; a new one is told within an interval or two."""
    names = Names(triton=["10.0.0.2", "10.0.0.1", "::1", "10.0.0.1"])
    told: list[list[str]] = []
    resolver = EndpointResolver(
        ["dns:///triton:8001"], 0.001, lambda e: told.append(addresses(e)), resolve=names.resolve
    )
    async with resolver:
        assert told == [["10.0.0.1:8001", "10.0.0.2:8001", "[::1]:8001"]]
        names.answers["triton"] = ["10.0.0.3"]
        await wait_until(lambda: len(told) == 2)
        assert told[1] == ["10.0.0.3:8001"]
        seen = names.num_lookups
        await wait_until(lambda: names.num_lookups > seen + 3)
        assert len(told) == 2
    seen = names.num_lookups
    await asyncio.sleep(0.01)
    assert names.num_lookups == seen


@pytest.mark.parametrize("failure", [OSError("no such name"), []])
async def test_failed_lookup_keeps_the_last_answer(
    failure: Sequence[str] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """While a name cannot be looked up, its known addresses stay, and that is logged once; the other names go on."""
    names = Names(one=["10.0.0.1"], two=["10.0.0.2"])
    told: list[list[str]] = []
    targets = ["dns:///one:1", "dns:///two:2"]
    with caplog.at_level(logging.INFO, "serve_app.triton.resolver"):
        async with EndpointResolver(targets, 0.001, lambda e: told.append(addresses(e)), resolve=names.resolve) as it:
            names.answers["one"] = failure
            await wait_until(lambda: "1 names failing" in repr(it))
            names.answers["two"] = ["10.0.0.9"]
            await wait_until(lambda: len(told) == 2)
            assert told[1] == ["10.0.0.1:1", "10.0.0.9:2"]
            seen = names.num_lookups
            await wait_until(lambda: names.num_lookups > seen + 4)
            assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
                f"cannot look up dns:///one:1 ({failure or 'no address'}); keeping 1 known addresses"
            ]
            names.answers["one"] = ["10.0.0.5"]
            await wait_until(lambda: len(told) == 3)
    assert caplog.records[-1].message == "dns:///one:1 can be looked up again"


async def test_name_unknown_at_the_start_is_found_later() -> None:
    """A name that does not exist yet is no error; its addresses are told once it does."""
    names = Names(triton=OSError("no such name"))
    told: list[list[str]] = []
    async with EndpointResolver(["dns:///triton:1"], 0.001, lambda e: told.append(addresses(e)), resolve=names.resolve):
        assert told == [[]]
        names.answers["triton"] = ["10.0.0.1"]
        await wait_until(lambda: len(told) == 2)


async def test_listener_that_raises_does_not_stop_the_lookups(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the listener is logged, and the next change is told all the same."""
    names = Names(triton=["10.0.0.1"])
    told: list[list[str]] = []

    def listen(endpoints: list[Endpoint]) -> None:
        told.append(addresses(endpoints))
        raise RuntimeError("listener")

    async with EndpointResolver(["dns:///triton:1"], 0.001, listen, resolve=names.resolve):
        names.answers["triton"] = ["10.0.0.2"]
        await wait_until(lambda: len(told) == 2)
    assert "listener" in caplog.text


async def test_system_lookup_gives_plain_addresses() -> None:
    """The system's resolver is asked for every address of a name."""
    assert "127.0.0.1" in await look_up("localhost", 8001)
