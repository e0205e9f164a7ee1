"""A Triton server that misbehaves on demand, for tests of everything that talks to Triton.

It is a real `grpc.aio` server on a loopback port, so that clients meet real sockets, real status codes and real
HTTP/2 limits. Its error texts are those of tritonserver 2.51.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.endpoint import Endpoint
from serve_app.protocol.parameters import EMPTY_FINAL_RESPONSE, FINAL_RESPONSE
from serve_app.triton.fake_control import FakeControlState
from serve_app.triton.fake_model import Failure, FakeModel, Lie, unknown_model
from serve_app.triton.fake_regions import FakeRegions
from serve_app.triton.fake_servicer import FakeServicer

__all__ = ["Failure", "FakeControlState", "FakeModel", "FakeTriton", "Lie", "RecordedCall"]

MAX_RECORDED = 100_000
"""Calls kept in `FakeTriton.calls`; older ones are forgotten."""


@dataclass(frozen=True)
class RecordedCall:
    """One inference request as it arrived, by ModelInfer or in a ModelStreamInfer.

    Attributes:
        model_name: Which model.
        model_version: Which version, as sent.
        id: Request id.
        rows: Rows of the first input; 1 for models without a batch dimension.
        size_bytes: Bytes of all raw inputs.
        peer: The client's connection, for example `ipv4:127.0.0.1:40000`; one per TCP connection.
        parameters: The request's parameters as plain values.
        outputs: Names of the requested outputs.
        timeout_s: Time that was left of the client's deadline on arrival; `None` when it set none.
    """

    model_name: str
    model_version: str
    id: str
    rows: int
    size_bytes: int
    peer: str
    parameters: dict[str, bool | int | float | str]
    outputs: tuple[str, ...]
    timeout_s: float | None


class FakeTriton:
    """A fault-injecting `GRPCInferenceService`.

    ```python
    async with FakeTriton(FakeModel(max_batch_size=4, latency_s=0.01)) as fake:
        channel = grpc.aio.insecure_channel(fake.address)
        ...
        fake.fail_next(grpc.StatusCode.INTERNAL, "out of memory", times=2)
        fake.models["identity"].lie = Lie.ROW_COUNT
        fake.freeze()          # inferences arrive and wait until fake.thaw()
        fake.hang()            # nothing is answered any more until fake.resume()
        await fake.go_away()   # GOAWAY on every connection, and back again on the same port
        await fake.kill()      # sockets die, the port is closed
        await fake.restart()   # the same port again
    ```

    Belongs to the event loop it was started in. `kill` and the end of the `async with` block cut off what still
    runs. `kill` finds the sockets in `/proc`, so it works on Linux only.

    Args:
        models: Models served; none means one `identity`.
        max_concurrent_streams: HTTP/2 limit of calls at once on one connection; `None` for gRPC's default.
        unix_socket: Path of a unix socket to listen on instead of a loopback port.

    Attributes:
        models: The models by name; change them while the server runs.
        address: Where clients connect; empty before `start`.
        is_live: What ServerLive answers.
        is_ready: What ServerReady answers.
        fail_when: Called with each `ModelInferRequest` after the model's latency; what it returns is how that
            call ends. For poisoned rows.
        calls: The ModelInfer calls that arrived, oldest first.
        num_cancelled: ModelInfer calls that the client gave up (cancelled, or past its deadline) while they ran.
        num_active: ModelInfer calls running now.
        max_active: Most ModelInfer calls that ever ran at once.
        num_streamed: Responses sent in streams.
        rpc_counts: Calls of each RPC by its name.
        control: What loads, unloads and settings have changed.
        regions: System shared memory that is registered.
    """

    def __init__(
        self, *models: FakeModel, max_concurrent_streams: int | None = None, unix_socket: str | None = None
    ) -> None:
        self.models = {model.name: model for model in models or (FakeModel(),)}
        self.address = ""
        self.is_live = True
        self.is_ready = True
        self.fail_when: Callable[[Any], Failure | None] | None = None
        self.calls: deque[RecordedCall] = deque(maxlen=MAX_RECORDED)
        self.num_cancelled = 0
        self.num_active = 0
        self.max_active = 0
        self.num_streamed = 0
        self.rpc_counts: Counter[str] = Counter()
        self.control = FakeControlState()
        self.regions = FakeRegions()
        self._options: list[tuple[str, int]] = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        if max_concurrent_streams is not None:
            self._options.append(("grpc.max_concurrent_streams", max_concurrent_streams))
        self._unix_socket = unix_socket
        self._failing: deque[tuple[Failure, str | None]] = deque()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._server: grpc.aio.Server | None = None

    # --- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeTriton:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen; on the port it had before, if it was started before."""
        server = grpc.aio.server(options=self._options, interceptors=[_Hang(self._resumed)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeServicer(self), server)
        if self._unix_socket is not None:
            self.address = f"unix:{self._unix_socket}"
            server.add_insecure_port(self.address)
        else:
            port = server.add_insecure_port(self.address or "127.0.0.1:0")
            self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def restart(self) -> None:
        """Listen again on the same port, after `kill` or `aclose`."""
        await self.start()

    async def aclose(self) -> None:
        """Stop listening and cut off what still runs."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.shield(server.stop(None))

    async def go_away(self, *, grace_s: float = 5.0) -> asyncio.Task[None]:
        """Stop as a server behind a rolling proxy does, and listen again on the same port at once.

        Every connection gets GOAWAY; calls under way may finish.

        Args:
            grace_s: How long these may take.

        Returns:
            The end of the old server; to be awaited before the loop ends.
        """
        server, self._server = self._server, None
        assert server is not None
        stopping = asyncio.ensure_future(server.stop(grace_s))
        while self._server is None:
            try:
                await self.start()
            except RuntimeError:  # the port is not free yet
                await asyncio.sleep(0.005)
        return stopping

    async def kill(self) -> None:
        """Die as a process does on SIGKILL: every connection breaks at once, then nobody listens."""
        server, self._server = self._server, None
        for link in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                if not os.readlink(link).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(link.name))) as candidate:
                    is_listening = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if self._is_at(candidate.getsockname()) and not is_listening:
                        candidate.shutdown(socket.SHUT_RDWR)
        if server is not None:
            await asyncio.shield(server.stop(None))

    def _is_at(self, name: Any) -> bool:
        if isinstance(name, tuple):  # gRPC's sockets are IPv6 ones: `::ffff:127.0.0.1`
            return str(name[0]).endswith("127.0.0.1") and f"127.0.0.1:{name[1]}" == self.address
        return bool(name) and name == self._unix_socket

    @property
    def endpoint(self) -> Endpoint:
        """The address as an endpoint that is known by its address alone."""
        return Endpoint.static(self.address)

    # --- faults -------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Let ModelInfer calls arrive and wait until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Let waiting calls go on, and later ones pass."""
        self._thawed.set()

    def hang(self) -> None:
        """Answer nothing, neither inferences nor anything else, as a process that is stopped."""
        self._thawed.clear()
        self._resumed.clear()

    def resume(self) -> None:
        """Answer again."""
        self._thawed.set()
        self._resumed.set()

    def fail_next(self, code: grpc.StatusCode, text: str, *, times: int = 1, model_name: str | None = None) -> None:
        """End the next `times` ModelInfer calls (of one model, or of any) with a status."""
        self._failing.extend([(Failure(code, text), model_name)] * times)

    # --- what happened ------------------------------------------------------------------------------------

    @property
    def peers(self) -> set[str]:
        """Connections from which ModelInfer calls arrived."""
        return {call.peer for call in self.calls}

    @property
    def rows(self) -> list[int]:
        """Rows of each ModelInfer, oldest first."""
        return [call.rows for call in self.calls]

    async def wait_until(self, is_true: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
        """Return once `is_true`, which is asked after each arrival and end of a ModelInfer.

        Raises:
            asyncio.TimeoutError: It was not true in time.
        """
        if is_true():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (is_true, waiter)
        self._waiters.append(entry)
        try:
            await asyncio.wait_for(waiter, timeout_s)
        finally:
            self._waiters.remove(entry)

    async def wait_for_calls(self, count: int, *, timeout_s: float = 5.0) -> None:
        """Return once at least `count` ModelInfer calls have arrived in all."""
        await self.wait_until(lambda: len(self.calls) >= count, timeout_s=timeout_s)

    async def wait_for_active(self, count: int, *, timeout_s: float = 5.0) -> None:
        """Return once exactly `count` ModelInfer calls run."""
        await self.wait_until(lambda: self.num_active == count, timeout_s=timeout_s)

    def _notify(self) -> None:
        for is_true, waiter in self._waiters:
            if not waiter.done() and is_true():
                waiter.set_result(None)

    def _take_failure(self, model_name: str) -> Failure | None:
        for index, (failure, only) in enumerate(self._failing):
            if only in (None, model_name):
                del self._failing[index]
                return failure
        return None

    async def infer(self, request: Any, *, peer: str, timeout_s: float | None) -> Failure | Any:
        """What a ModelInfer ends with: a `ModelInferResponse`, or a failure."""
        model = self.models.get(request.model_name)
        with self._recorded(model, request, peer, timeout_s):
            if model is not None and model.is_decoupled:
                text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
                return Failure(grpc.StatusCode.UNIMPLEMENTED, text)
            return await self._run(model, request)

    async def stream(self, request: Any, *, peer: str, timeout_s: float | None) -> AsyncGenerator[Failure | Any, None]:
        """What one request of a ModelStreamInfer is answered with, `ModelInferResponse` by response, or a failure."""
        model = self.models.get(request.model_name)
        with self._recorded(model, request, peer, timeout_s):
            for index in range(model.num_responses if model is not None and model.is_decoupled else 1):
                answer = await self._run(model, request)
                if model is not None and index == model.fail_after:
                    answer = Failure(grpc.StatusCode.INVALID_ARGUMENT, f"no more than {index} responses")
                if not isinstance(answer, Failure):
                    answer.parameters[FINAL_RESPONSE].bool_param = model is not None and not model.is_decoupled
                self.num_streamed += 1
                self._notify()
                yield answer
                if isinstance(answer, Failure):
                    return
            if model is not None and model.is_decoupled and request.parameters[EMPTY_FINAL_RESPONSE].bool_param:
                last = service_pb2.ModelInferResponse(model_name=model.name, id=request.id)
                last.parameters[FINAL_RESPONSE].bool_param = True
                yield last

    @contextlib.contextmanager
    def _recorded(self, model: FakeModel | None, request: Any, peer: str, timeout_s: float | None) -> Iterator[None]:
        call = RecordedCall(
            request.model_name,
            request.model_version,
            request.id,
            model.rows_of(request) if model else 1,
            sum(map(len, request.raw_input_contents)),
            peer,
            {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in request.parameters.items()},
            tuple(output.name for output in request.outputs),
            timeout_s,
        )
        self.calls.append(call)
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        self._notify()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += self._server is not None  # our own stop is not the client's doing
            raise
        finally:
            self.num_active -= 1
            self._notify()

    async def _run(self, model: FakeModel | None, request: Any) -> Failure | Any:
        failure = self._take_failure(request.model_name) or self.regions.read(request) or _find_failure(model, request)
        if failure is None and model is not None and model.latency_s:
            await asyncio.sleep(model.latency_s)
        await self._thawed.wait()
        if failure is None and self.fail_when is not None:
            failure = self.fail_when(request)
        if failure is not None:
            return failure
        answer = model.answer(request)  # type: ignore[union-attr]  # no model is a failure
        return self.regions.write(request, answer) or answer

    def __repr__(self) -> str:
        state = "stopped" if self._server is None else "running" if self._thawed.is_set() else "frozen"
        return (
            f"<FakeTriton {self.address or 'no address'} [{state}] Models: {', '.join(self.models)} | "
            f"Calls: {self.num_active} active, {len(self.calls)} seen, {self.num_cancelled} cancelled>"
        )


def _find_failure(model: FakeModel | None, request: Any) -> Failure | None:
    if model is None:
        return unknown_model(request.model_name)
    return model.find_failure(request.model_version) or model.check(request)


class _Hang(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Keeps every call from being taken up until an event is set."""

    def __init__(self, resumed: asyncio.Event) -> None:
        self._resumed = resumed

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        await self._resumed.wait()
        return await continuation(details)
