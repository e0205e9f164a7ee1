"""Steady callers of the product whose every payload is unique, so that each answer can be told from all others."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

import aiohttp
import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from tritonclient.utils import InferenceServerException

MODEL = "picky"
"""An identity that refuses, fails or dies on certain values; the callers' own are none of these."""

PATIENCE_S = 60.0
"""A request that has not ended after this hangs: twice the model's budget."""

SETTLED = 50
"""Answers to each caller after which a server that says it is ready is one that the front knows, too."""

_CALLER_STRIDE = 65_536  # so that caller and turn can be read from a value; below 2**24, where FP32 ends to be exact
_OF_TRANSPORT = re.compile(
    "failed to connect|connection refused|connection reset|socket closed|transport closed|broken pipe|recvmsg|goaway"
    "|rst_stream|stream removed|http2 header",
    re.IGNORECASE,
)
"""In what gRPC says of a connection that failed, which nobody has answered on."""

_PAUSE_S = 0.02
_FIRST_VALUE = 4096  # above the values that the model does not like


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    TYPED = "typed"
    """An error in V2 form: an HTTP status with `{"error": ...}`, or a gRPC status that a server set."""
    LOST = "lost"
    """No answer, or one that is not ours: a connection that broke, a proxy's own page."""
    WRONG = "wrong"
    CROSSED = "crossed"
    """Another caller's values."""
    HUNG = "hung"


@dataclass(frozen=True)
class Ended:
    """One request.

    Attributes:
        outcome: How it ended.
        detail: Of an error: its kind.
        began_at: On the monotonic clock, in seconds.
        ended_at: The same.
        caller: Whose it was.
    """

    outcome: Outcome
    detail: str
    began_at: float
    ended_at: float
    caller: int = 0


@dataclass
class Record:
    """What a load saw; see `Ended`."""

    ended: list[Ended] = field(default_factory=list)

    def since(self, time_s: float) -> list[Ended]:
        """Requests that ended later than that."""
        return [ended for ended in self.ended if ended.ended_at >= time_s]

    def has_answers_since(self, time_s: float, *, each: int, num_callers: int) -> bool:
        """Whether every caller has had so many answers that it asked for since then."""
        counts = Counter(one.caller for one in self.ended if one.outcome is Outcome.OK and one.began_at >= time_s)
        return len(counts) == num_callers and min(counts.values()) >= each


Ask = Callable[[npt.NDArray[np.float32]], Awaitable[npt.NDArray[np.float32]]]


class TypedError(Exception):
    """The server's own error; the text is its kind."""


class LostAnswer(Exception):
    """No answer of the server; the text is what there was instead."""


def judge(sent: npt.NDArray[np.float32], got: npt.NDArray[np.float32]) -> Outcome:
    """Whether an answer is its request's, another caller's, or none at all."""
    if got.shape == sent.shape and np.array_equal(got, sent):
        return Outcome.OK
    own = int(sent.flat[0]) // _CALLER_STRIDE
    is_payload = got.size > 0 and bool(np.isfinite(got).all()) and float(got.flat[0]) >= _FIRST_VALUE
    return Outcome.CROSSED if is_payload and int(got.flat[0]) // _CALLER_STRIDE != own else Outcome.WRONG


def payload(caller: int, turn: int) -> npt.NDArray[np.float32]:
    """One row of two values that no other request in flight has."""
    value = caller * _CALLER_STRIDE + _FIRST_VALUE + turn % (_CALLER_STRIDE - _FIRST_VALUE)
    return np.array([[value, value]], np.float32)


class SteadyLoad:
    """Callers in turn by HTTP JSON, HTTP binary and gRPC, each with one request at a time; `async with`.

    Args:
        http: `host:port` of the HTTP ingress.
        grpc: The same of the gRPC ingress.
        num_callers: At most 200, so that payloads stay exact.
    """

    def __init__(self, http: str, grpc: str, *, num_callers: int = 12) -> None:
        self._http, self._grpc = http, grpc
        self._num_callers = num_callers
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self.record = Record()

    async def __aenter__(self) -> SteadyLoad:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S))
        self._http_client = triton_http.InferenceServerClient(self._http, conn_limit=100, conn_timeout=PATIENCE_S)
        self._grpc_client = triton_grpc.InferenceServerClient(self._grpc)
        ways: list[Ask] = [self._by_json, self._by_binary, self._by_grpc]
        self._tasks = [
            asyncio.create_task(self._call(number, ways[number % len(ways)])) for number in range(self._num_callers)
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop.set()
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._session.close()
            await self._http_client.close()
            await self._grpc_client.close()

    def is_answered_since(self, time_s: float, *, each: int = 10) -> bool:
        """Whether every caller has had so many answers to requests of since then; a gRPC channel may pause for long."""
        return self.record.has_answers_since(time_s, each=each, num_callers=self._num_callers)

    async def _call(self, caller: int, ask: Ask) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            sent = payload(caller, turn)
            began_at = time.monotonic()
            outcome, detail = await outcome_of(ask, sent)
            self.record.ended.append(Ended(outcome, detail, began_at, time.monotonic(), caller))
            await asyncio.sleep(_PAUSE_S)

    async def _by_json(self, sent: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        entry = {"name": "INPUT0", "shape": list(sent.shape), "datatype": "FP32", "data": sent.ravel().tolist()}
        url = f"http://{self._http}/v2/models/{MODEL}/infer"
        try:
            async with self._session.post(url, json={"inputs": [entry]}) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise _error_of(answer.status, answer.content_type, text)
                (output,) = (await answer.json())["outputs"]
        except aiohttp.ClientError as error:
            raise LostAnswer(type(error).__name__) from error
        return np.array(output["data"], np.float32).reshape(output["shape"])

    async def _by_binary(self, sent: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        tensor = triton_http.InferInput("INPUT0", list(sent.shape), "FP32")
        tensor.set_data_from_numpy(sent)
        try:
            answer = await self._http_client.infer(MODEL, [tensor])
        except InferenceServerException as error:
            if (error.status() or "").isdigit() and error.message():
                raise TypedError(_kind(f"HTTP {error.status()}", error.message())) from error
            raise LostAnswer(str(error)[:60]) from error
        except aiohttp.ClientError as error:
            raise LostAnswer(type(error).__name__) from error
        values: npt.NDArray[np.float32] = answer.as_numpy("OUTPUT0")
        return values

    async def _by_grpc(self, sent: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        tensor = triton_grpc.InferInput("INPUT0", list(sent.shape), "FP32")
        tensor.set_data_from_numpy(sent)
        try:
            answer = await self._grpc_client.infer(MODEL, [tensor])
        except InferenceServerException as error:
            if _OF_TRANSPORT.search(error.message()):
                raise LostAnswer(f"{error.status()}: {error.message()}"[:60]) from error
            status = (error.status() or "").removeprefix("StatusCode.")
            raise TypedError(_kind(f"gRPC {status}", error.message())) from error
        values: npt.NDArray[np.float32] = answer.as_numpy("OUTPUT0")
        return values


async def outcome_of(ask: Ask, sent: npt.NDArray[np.float32]) -> tuple[Outcome, str]:
    """Ask once; how it ended, and the kind of error."""
    try:
        return judge(sent, await asyncio.wait_for(ask(sent), PATIENCE_S)), ""
    except TypedError as error:
        return Outcome.TYPED, str(error)
    except LostAnswer as error:
        return Outcome.LOST, str(error)
    except asyncio.TimeoutError:
        return Outcome.HUNG, ""


def errors_by_kind(ended: list[Ended]) -> Counter[str]:
    """How many of each kind of error."""
    return Counter(one.detail for one in ended if one.outcome in (Outcome.TYPED, Outcome.LOST))


def _error_of(status: int, content_type: str, text: str) -> Exception:
    is_ours = content_type == "application/json" and '"error"' in text
    return (
        TypedError(_kind(f"HTTP {status}", text))
        if is_ours
        else LostAnswer(f"HTTP {status} {content_type}: {text[:40]!r}")
    )


def _kind(status: str, text: str) -> str:
    """A status and the beginning of its text, without what differs from one time to the next."""
    words = re.sub(r"[0-9a-f.:]{5,}|[0-9]+|[{}\"]", "", text.removeprefix('{"error":'))
    return f"{status} {words[:70].strip()}"
