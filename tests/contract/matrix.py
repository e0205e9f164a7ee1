"""Runs the whole table against us and against Triton, and says for each case and way what both answered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve_app.protocol.binary import HEADER_LENGTH
from tests.contract import rendering
from tests.contract.asking import CALL_S, Outcome, Server, grpc_outcome, handle_outcome, http_outcome
from tests.contract.case import GRPC, GRPC_TYPED, HANDLE, HTTP_BINARY, HTTP_JSON, KINDS, UNIQUE, Call, Case, Row
from tests.contract.differences import documented

_sequence_numbers = itertools.count(1)
Send = Callable[[Server], Outcome]
SendIn = Callable[[Server, str], Outcome]
"""With the sequence id for `UNIQUE`."""


# What a server that is not there gets us; two of these are not "the same answer".
_BROKEN = ("no V2 answer", "503", "UNAVAILABLE")


@dataclass
class Result:
    """One row's outcomes, by way in."""

    row: Row
    ours: dict[str, Outcome] = field(default_factory=dict)
    theirs: dict[str, Outcome] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """What is not as the table says, one line for each."""
        found = list(self._faults_by_way())
        if self.row.difference and not any(self._differs(way) for way in self.ours):
            found.append(f"{self.row.name}: no way in shows the difference {self.row.difference!r}")
        return found

    def _faults_by_way(self) -> Iterator[str]:
        for way, ours in self.ours.items():
            expected = [KINDS[kind][0 if way.startswith("http") else 1] for kind in self.row.ours.split(" or ")]
            theirs = self._theirs(way)
            is_broken = theirs.status in _BROKEN[0 if not self.row.difference else 1 :]
            if ours.status in _BROKEN or is_broken:
                yield f"{self.row.name}, {way}: nothing to compare: ours {brief(ours)}, Triton's {brief(theirs)}"
            elif self._differs(way) and not (self.row.difference and ours.status in expected):
                yield f"{self.row.name}, {way}: ours {brief(ours)}, Triton's {brief(theirs)}"
            elif not ours.is_ok:
                if "\n" in ours.text or "Traceback" in ours.text or not ours.text:
                    yield f"{self.row.name}, {way}: the error is not one line: {ours.text!r}"
                missing = [word for word in self.row.says if word not in ours.text]
                yield from (f"{self.row.name}, {way}: no {word!r} in {ours.text!r}" for word in missing)

    def _theirs(self, way: str) -> Outcome:
        theirs = self.theirs[GRPC if way == HANDLE else way]
        # A handle brings the outputs alone.
        return Outcome(theirs.status, theirs.value[0], theirs.text) if way == HANDLE and theirs.is_ok else theirs

    def _differs(self, way: str) -> bool:
        ours, theirs = self.ours[way], self._theirs(way)
        return (ours.status, ours.value) != (theirs.status, theirs.value)


def brief(outcome: Outcome) -> str:
    """One line of an outcome."""
    text = outcome.text if not outcome.is_ok else repr(outcome.value)
    return f"{outcome.status} {text[:160]}"


def run(rows: Iterable[Row], ours: Server, theirs: Server, *, num_threads: int = 8) -> list[Result]:
    """Every row by every way that it has; rows run side by side."""
    with ThreadPoolExecutor(num_threads, "contract") as pool:
        return list(pool.map(lambda row: _run_row(row, ours, theirs), rows))


def ways_of(row: Row) -> list[str]:
    """The ways in by which a row is sent."""
    return list(_case_ways(row) if isinstance(row, Case) else _call_ways(row))


def ask_as_written(server: Server, row: Row) -> Outcome:
    """The outcome of a row by the first of its ways."""
    send = next(iter((_case_ways(row) if isinstance(row, Case) else _call_ways(row)).values()))
    return _safely(send, server)


def is_live(server: Server) -> bool:
    """Whether a server answers at all."""
    return _safely(lambda server: http_outcome(server.ask_http("GET", "/v2/health/ready", b"", {}), str), server).is_ok


def _run_row(row: Row, ours: Server, theirs: Server) -> Result:
    result = Result(row)
    for way, send in (_case_ways(row) if isinstance(row, Case) else _call_ways(row)).items():
        result.ours[way] = _safely(send, ours)
        if way != HANDLE:
            is_asked = not (isinstance(row, Case) and row.ends_triton)
            result.theirs[way] = _safely(send, theirs) if is_asked else Outcome("its process ends")
    return result


def _safely(send: Send, server: Server) -> Outcome:
    try:
        return send(server)
    except Exception as error:  # an answer that is none is an outcome too, and one that nothing equals
        return Outcome("no V2 answer", None, f"{type(error).__name__}: {error}")


def _call_ways(call: Call) -> dict[str, Send]:
    ways: dict[str, Send] = {}
    if call.http is not None:
        method, path, body = call.http
        look = None if path.partition("?")[0].endswith("/infer") else call.look
        ways[HTTP_JSON] = lambda server: http_outcome(server.ask_http(method, path, body, call.headers), look)
    if call.rpc is not None:
        rpc, message = call.rpc
        look_pb = None if rpc == "ModelInfer" else call.look
        ways[GRPC] = lambda server: grpc_outcome(lambda: server.ask_grpc(rpc, message), look_pb)
    return ways


def _case_ways(case: Case) -> dict[str, Send]:
    """How a case is sent by each way that can carry it; its steps go first, all in one sequence."""
    ways = _sends(case, case.body, case.header_length)
    if not case.before:
        return {way: partial(_with_new_sequence, send) for way, send in ways.items()}
    before = [_sends(case, json.dumps(document).encode(), None) for document in case.before]

    def in_turn(way: str) -> Send:
        def send(server: Server) -> Outcome:
            sequence_id = _sequence_id()
            for step in before:
                assert step[way](server, sequence_id).is_ok, f"a step before {case.name!r} failed"
            return ways[way](server, sequence_id)

        return send

    return {way: in_turn(way) for way in ways}


def _with_new_sequence(send: SendIn, server: Server) -> Outcome:
    return send(server, _sequence_id())


def _sequence_id() -> str:
    return f"contract-{next(_sequence_numbers)}"


def _sends(case: Case, body: bytes, header_length: int | None) -> dict[str, SendIn]:
    is_binary = header_length is not None
    request = None if case.is_wire or case.headers else rendering.request_of(body, header_length)

    written = partial(_ask_rendered, case, (body, header_length))
    ways: dict[str, SendIn] = {HTTP_BINARY if is_binary else HTTP_JSON: written}
    if request is None:
        return ways
    for way, rendered in _renderings(request).items():
        if way not in ways:
            ways[way] = partial(_ask_rendered, case, rendered)
    for way, is_typed in ((GRPC, False), (GRPC_TYPED, True)):
        message = rendering.as_message(request, case, is_typed=is_typed)
        if message is not None:
            ways[way] = partial(_ask_model_infer, case, message)
    arrays = rendering.as_arrays(request)
    if arrays is not None and GRPC in ways:
        ways[HANDLE] = partial(_ask_handle, case, request, arrays)
    return ways


def _renderings(request: rendering.Request) -> Mapping[str, tuple[bytes, int | None]]:
    found: dict[str, tuple[bytes, int | None]] = {}
    text, binary = rendering.as_json(request), rendering.as_binary(request)
    if text is not None:
        found[HTTP_JSON] = (text, None)
    if binary is not None:
        found[HTTP_BINARY] = binary
    return found


def _ask_rendered(case: Case, written: tuple[bytes, int | None], server: Server, sequence_id: str) -> Outcome:
    body, header_length = rendering.with_sequence(*written, sequence_id)
    headers = dict(case.headers)
    if header_length is not None:
        headers[HEADER_LENGTH] = f"{header_length}"
    if case.timeout_s:
        headers["x-request-timeout-seconds"] = f"{case.timeout_s}"
    version = f"/versions/{case.version}" if case.version else ""
    return http_outcome(server.ask_http("POST", f"/v2/models/{case.model}{version}/infer", body, headers))


def _ask_model_infer(case: Case, message: Any, server: Server, sequence_id: str) -> Outcome:
    copy = type(message)()
    copy.CopyFrom(message)
    if "sequence_id" in copy.parameters and copy.parameters["sequence_id"].string_param == UNIQUE:
        copy.parameters["sequence_id"].string_param = sequence_id
    return grpc_outcome(lambda: server.ask_grpc("ModelInfer", copy, case.timeout_s or CALL_S))


def _ask_handle(case: Case, request: rendering.Request, arrays: Any, server: Server, sequence_id: str) -> Outcome:
    assert server.handle is not None
    parameters = {k: sequence_id if v == UNIQUE else v for k, v in request.parameters.items()}
    handle = server.handle
    return handle_outcome(
        lambda: handle(
            case.model,
            arrays,
            model_version=case.version,
            outputs=[name for name, _ in request.outputs] or None,
            parameters=parameters,
            request_id=request.id,
            timeout_s=case.timeout_s or CALL_S,
        )
    )


def lines(results: Iterable[Result]) -> Iterator[str]:
    """The matrix as text: a line for each case and way, ours and Triton's, and why they differ where they do."""
    reasons = documented()
    for result in results:
        for way, ours in result.ours.items():
            theirs = result._theirs(way)
            same = "different" if result._differs(way) else "same"
            yield f"{result.row.name} | {way} | {same} | ours: {brief(ours)} | Triton's: {brief(theirs)}"
        if result.row.difference:
            reason = reasons.get(result.row.difference)
            yield f"    on purpose: {result.row.difference}: {reason.why if reason else 'NOT DOCUMENTED'}"
