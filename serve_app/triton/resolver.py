"""From the addresses in the settings to endpoints, looked up again while the process runs."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from serve_app.endpoint import Endpoint
from serve_app.errors import PreflightFailed

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 5.0
"""How long one DNS lookup may take before the last answer is kept; the usual timeout of a resolver's one query."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""All IP addresses behind a name; the second argument is the port, which some lookups need."""

_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?\.?$")
_FIX = "Write `host:port`, `[IPv6 address]:port`, `dns:///name:port` or `unix:/path`."


@dataclass(frozen=True, slots=True)
class Target:
    """One checked address of the settings.

    Attributes:
        text: The address, as gRPC takes it for static ones.
        host: Name to look up; empty for static addresses.
        port: Its port; 0 for static addresses.
    """

    text: str
    host: str = ""
    port: int = 0

    @property
    def is_static(self) -> bool:
        """Whether there is nothing to look up."""
        return not self.host


def parse_target(text: str) -> Target:
    """Check the syntax of an address.

    Raises:
        PreflightFailed: It is none of the accepted forms.
    """
    text = text.strip()
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/") or path == "/":
            raise PreflightFailed(f"Endpoint {text!r} has no absolute socket path.", _FIX)
        return Target(f"unix:{path}")
    if text.startswith("dns:///"):
        host, port = _split(text, text.removeprefix("dns:///"))
        return Target(text, host, port)
    if "://" in text:
        raise PreflightFailed(f"Endpoint {text!r} has a scheme that gRPC has no use for.", _FIX)
    for scheme, version in (("ipv4:", 4), ("ipv6:", 6)):
        if text.startswith(scheme):
            host, port = _split(text, text.removeprefix(scheme))
            if not _is_ip(host, version):
                raise PreflightFailed(f"Endpoint {text!r} has no IPv{version} address after {scheme!r}.", _FIX)
            return Target(_join(host, port))
    return Target(_join(*_split(text, text)))


def _split(text: str, address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise PreflightFailed(f"Endpoint {text!r} has no port from 1 to 65535 at its end.", _FIX)
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if is_bracketed != (":" in host) or not (_is_ip(host, 6) if is_bracketed else _HOST.match(host)):
        raise PreflightFailed(f"Endpoint {text!r} has no valid host before its port.", _FIX)
    return host, int(port)


def _is_ip(host: str, version: int) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == version
    return False


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def look_up(host: str, port: int) -> list[str]:
    """Every IPv4 and IPv6 address of a name, by the system's resolver.

    Raises:
        OSError: The name has none, or nobody could be asked.
        ValueError: The name cannot be a DNS name, because of a label that is too long.
    """
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


class EndpointResolver:
    """The endpoints behind a list of addresses, told to a listener whenever they change.

    Static addresses are endpoints as they are; note that gRPC picks one address of a plain `host:port` name and stays
    with it. `dns:///name:port` stands for every address behind the name, looked up again every `interval_s`; while
    lookups fail, or find nothing, the last good answer stays, and that is logged once.

    ```python
    async with EndpointResolver(["dns:///triton:8001"], interval_s=5.0, on_change=router.update):
        ...
    ```

    Args:
        targets: Addresses; see `parse_target`.
        interval_s: Pause between lookups in seconds.
        on_change: Called in the loop with all endpoints, first when the `async with` block is entered.
        resolve: How names are looked up.

    Raises:
        PreflightFailed: An address is malformed.
    """

    def __init__(
        self,
        targets: Sequence[str],
        interval_s: float,
        on_change: Callable[[list[Endpoint]], None],
        *,
        resolve: Resolve = look_up,
    ) -> None:
        self._targets = [parse_target(text) for text in targets]
        self._interval_s, self._on_change, self._resolve = interval_s, on_change, resolve
        self._answers: dict[Target, list[str]] = {}
        self._failing: set[Target] = set()
        self._told: list[Endpoint] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EndpointResolver:
        await self.refresh()
        if any(not target.is_static for target in self._targets):
            self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop looking names up. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    @property
    def is_running(self) -> bool:
        """Whether names are looked up again and again, or there are none."""
        return self._task is None or not self._task.done()

    @property
    def endpoints(self) -> list[Endpoint]:
        """What is known now: the settings' order, each name's addresses sorted, no address twice."""
        addresses: dict[str, None] = {}
        for target in self._targets:
            addresses.update(dict.fromkeys([target.text] if target.is_static else self._answers.get(target, [])))
        return [Endpoint.static(address) for address in addresses]

    async def refresh(self) -> None:
        """Look every name up now, all at once, and tell the listener if anything changed."""
        await asyncio.gather(*(self._refresh(target) for target in self._targets if not target.is_static))
        endpoints = self.endpoints
        if endpoints != self._told:
            self._told = endpoints
            try:
                self._on_change(endpoints)
            except Exception:
                logger.exception("the listener to changes of the Triton addresses failed")

    async def _refresh(self, target: Target) -> None:
        try:
            found = await asyncio.wait_for(self._resolve(target.host, target.port), LOOKUP_TIMEOUT_S)
            if not found:
                raise OSError("no address")
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            if target not in self._failing:
                self._failing.add(target)
                logger.warning(
                    "cannot look up %s (%s); keeping %d known addresses",
                    target.text,
                    str(error) or "no answer",
                    len(self._answers.get(target, [])),
                )
            return
        if target in self._failing:
            self._failing.discard(target)
            logger.info("%s can be looked up again", target.text)
        self._answers[target] = sorted({_join(ip, target.port) for ip in found})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.refresh()
            except Exception:
                logger.exception("the lookup of the Triton addresses failed in an unforeseen way")

    def __repr__(self) -> str:
        names = ", ".join(target.text for target in self._targets)
        return f"<EndpointResolver {names} | {len(self.endpoints)} endpoints, {len(self._failing)} names failing>"
