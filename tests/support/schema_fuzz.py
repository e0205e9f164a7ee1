"""Sends generated requests to the front and keeps an account: `python -m tests.support.schema_fuzz --requests 10000`.

By operation it counts the statuses and finds the longest answer; an answer that is neither what the schema says nor a
difference that is named here makes it fail.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from schemathesis import Case as AnyCase
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)

from tests.support.schema_cases import MODELS, SCHEMAS_VARIABLE, Document, near_bodies, open_inference_schema
from tests.support.schema_front import DECOUPLED, GENERATOR, SPARE, SchemaFront, running_schema_front
from tests.support.stack import name_of
from tests.support.waiting import wait_until_sync

ANSWER_TIMEOUT_S = 60.0
"""Without an answer for so long a request hangs; loads that start a process on a busy machine need some of it."""

_CHECKS = [content_type_conformance, response_headers_conformance, response_schema_conformance]
_NAMES, _VERSIONS = ("name", "MODEL_NAME"), ("version", "MODEL_VERSION")
_JSON = "application/json"
_BUDGET = "x-request-timeout-seconds"
_CONTROL = ("/load", "/unload", "/setting", "/logging")
_HEAVY = ("/infer", "/generate", "/generate_stream")

Answer = Any
"""schemathesis' own class of responses."""

Case = AnyCase[Any]


@dataclass(frozen=True)
class Named:
    """Answers that are right although they are server errors, or that the schema does not have.

    Attributes:
        name: For docs and report.
        statuses: Of these answers.
        why: One line.
        is_met: Whether a request, and its answer, are of this kind.
    """

    name: str
    statuses: frozenset[int]
    why: str
    is_met: Callable[[Case, Answer], bool] = lambda case, answer: True


def _model_of(case: Case) -> str:
    return str(next((case.path_parameters[name] for name in _NAMES if name in case.path_parameters), ""))


def _is_text_in(case: Case, *texts: str) -> bool:
    written = repr(case.body)
    return any(text in written for text in texts)


def _has_budget(case: Case, answer: Answer) -> bool:
    return _BUDGET in {name.lower() for name in case.headers} or _is_text_in(case, "timeout")


SERVER_ERRORS = [
    Named("shared memory", frozenset({501}), "refused unless it is allowed", lambda c, a: "sharedmemory" in c.path),
    Named(
        "a decoupled model by `infer`",
        frozenset({501}),
        "it has no single answer",
        lambda c, a: c.path.endswith("/infer") and _model_of(c) == DECOUPLED,
    ),
    Named(
        "a repository by name", frozenset({501}), "Triton has no calls for one", lambda c, a: "{repository}" in c.path
    ),
    Named(
        "the file of logs or traces",
        frozenset({501}),
        "Triton lets nobody move it",
        lambda c, a: _is_text_in(c, "log_file", "trace_file"),
    ),
    Named(
        "a model that is not loaded",
        frozenset({503}),
        "it may be later",
        lambda c, a: _model_of(c) not in set(MODELS) - {SPARE},
    ),
    Named("a budget that ran out", frozenset({504}), "it was the caller's", _has_budget),
]
"""Statuses of 500 and more that our document declares and that a generated request may meet."""

_ERRORS = frozenset({400, 404, 501, 503, 504})
OPEN_INFERENCE = [
    *SERVER_ERRORS,
    Named(
        "`GET /v2/`",
        frozenset({404, 405}),
        "the path is `/v2`, as in Triton and in the protocol's text",
        lambda c, a: c.path == "/v2/",
    ),
    Named("errors that its schema does not list", _ERRORS, "it lists few; ours are those of the table of errors"),
    Named(
        "binary tensor data",
        frozenset({200}),
        "Triton's extension, asked for by a parameter",
        lambda c, a: _is_text_in(c, "binary_data"),
    ),
    Named(
        "`generate` of any model",
        frozenset({200}),
        "inputs and outputs are called as the model calls them, not only `text_input` and `text_output`",
        lambda c, a: c.path.endswith(("/generate", "/generate_stream")) and _model_of(c) != GENERATOR,
    ),
]
"""Where the published schema says otherwise than Triton, whose clients ours are; each is in docs/protocol.md."""


@dataclass
class Row:
    """Account of one operation.

    Attributes:
        statuses: Answers by status.
        longest_s: Longest time that an answer took, in seconds.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0


@dataclass
class Report:
    """Account of a run.

    Attributes:
        rows: By method and path.
        named: How often each named kind was met.
        foreign: What must not be, each with the request that led to it.
        num_foreign: How many there were; `foreign` keeps the first ones.
        growth_bytes: Growth of resident memory in the second half, of the front and of the server.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    named: Counter[str] = field(default_factory=Counter)
    foreign: list[str] = field(default_factory=list)
    num_foreign: int = 0
    growth_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Requests that were answered."""
        return sum(row.statuses.total() for row in self.rows.values())

    @property
    def longest_s(self) -> float:
        """Longest time that any answer took, in seconds."""
        return max((row.longest_s for row in self.rows.values()), default=0.0)

    def add_foreign(self, text: str) -> None:
        """Note what must not be."""
        self.num_foreign += 1
        if len(self.foreign) < 20:
            self.foreign.append(text[:1500])

    def lines(self) -> Iterator[str]:
        """The account as a table."""
        for label, row in sorted(self.rows.items()):
            statuses = "  ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
            yield f"{row.statuses.total():6} {row.longest_s:7.3f} s  {label:70} {statuses}"
        total: Counter[int] = Counter()
        for row in self.rows.values():
            total.update(row.statuses)
        yield f"{self.num_requests:6} {self.longest_s:7.3f} s  all  {dict(sorted(total.items()))}"
        yield f"named: {dict(self.named)}"
        yield f"growth of resident memory in the second half: {self.growth_bytes} B"
        yield from (f"FOREIGN {text}" for text in self.foreign)
        yield f"foreign: {self.num_foreign}"


class Fuzz:
    """One run against a front.

    Args:
        front: Where the requests go.
        document: OpenAPI.
        named: Answers that are right although the document may not have them.
    """

    def __init__(self, front: SchemaFront, document: Document, named: Sequence[Named]) -> None:
        self.report = Report()
        self._document = document
        self._url = front.url
        self._processes = {"front": front.process, "tritonserver": front.triton}
        self._named = named
        self._schema = schemathesis.openapi.from_dict(document)
        self._operations = [each.ok() for each in self._schema.get_all_operations() if isinstance(each, Ok)]
        self._session = requests.Session()
        self._start_bytes: dict[str, int] = {}

    def run(self, num_requests: int, *, seed: int) -> Report:
        """Send about that many, at least."""
        with contextlib.closing(self._session), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what schemathesis thinks about a schema
            with settings_put_back(self._url, self._session):
                for operation in self._operations:
                    self._cover(operation, max(2, num_requests // 3 // len(self._operations)))
                self._generate(num_requests // 2, seed)
                self._start_bytes = self._sizes()
                self._generate(num_requests, seed + 1000)
        now = self._sizes()
        self.report.growth_bytes = {name: size - self._start_bytes[name] for name, size in now.items()}
        return self.report

    def _sizes(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self._processes.items()}

    def _find_server(self) -> None:
        """The server that was started in place of one that has ended."""
        url = f"{self._url}/v2/health/ready"
        wait_until_sync(lambda: requests.get(url, timeout=ANSWER_TIMEOUT_S).ok, timeout_s=60, what="another server")
        children = self._processes["front"].children(recursive=True)
        self._processes["tritonserver"] = next(child for child in children if name_of(child) == "tritonserver")

    def _cover(self, operation: Any, num_cases: int) -> None:
        """What schemathesis lists for each part of an operation: bounds, missing parts, methods that are not there."""
        cases = self._schema.iter_coverage_cases(
            operation,
            generation_modes=list(GenerationMode),
            generation_config=self._schema.config.generation_for(operation=operation),
        )
        for index, case in enumerate(itertools.islice(cases, num_cases)):
            self._place(case, MODELS[index % len(MODELS)] if index % 3 else None)
            self._send(operation.label, case)

    def _generate(self, num_requests: int, seed: int) -> None:
        for round_index in itertools.count():
            missing = num_requests - self.report.num_requests
            if missing <= 0 or round_index > 20:
                return
            weights = [
                6 if each.path.endswith(_HEAVY) else 2 if each.path.endswith(_CONTROL) else 1
                for each in self._operations
            ]
            for weight, operation in zip(weights, self._operations, strict=True):
                if round_index and weight == 1:
                    continue  # a few requests are all that there are
                self._examples(operation, max(1, missing * weight // sum(weights)), seed + round_index)

    def _examples(self, operation: Any, num_examples: int, seed: int) -> None:
        has_parts = bool(list(operation.iter_parameters())) or bool(operation.body)
        modes = list(GenerationMode) if has_parts else [GenerationMode.POSITIVE]
        cases = {mode: operation.as_strategy(generation_mode=mode) for mode in modes}
        is_near = near_bodies(operation.path, "") is not None
        if is_near:  # a body that is replaced need not be generated
            bare = operation.as_strategy(generation_mode=GenerationMode.POSITIVE, body={}, media_type=_JSON)

        @with_seed(seed)
        @settings(
            max_examples=num_examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def send(data: st.DataObject) -> None:
            takes_near = is_near and data.draw(st.integers(0, 3)) > 0
            case = data.draw(bare if takes_near else cases[data.draw(st.sampled_from(modes))])
            self._place(case, data.draw(st.sampled_from([*MODELS, None])))
            near = near_bodies(operation.path, _model_of(case)) if takes_near else None
            if near is not None:
                case.body, case.media_type = data.draw(near), _JSON
            self._send(operation.label, case)

        send()

    def _place(self, case: Case, model: str | None) -> None:
        """Ask for a model that may be there, but load and unload the spare one and none that others ask for."""
        for name in _NAMES:
            if name in case.path_parameters and model is not None:
                case.path_parameters[name] = model
        if case.path.endswith(("/load", "/unload")) and _model_of(case) in MODELS:
            case.path_parameters["name"] = SPARE
        if _model_of(case) == DECOUPLED:  # a budget that runs out cancels; see docs/protocol.md on what that can do
            for name in [name for name in case.headers if name.lower() == _BUDGET]:
                del case.headers[name]
        for version in _VERSIONS:
            if version in case.path_parameters and model is not None:
                case.path_parameters[version] = "1"

    def _send(self, label: str, case: Case) -> None:
        row = self.report.rows.setdefault(label, Row())
        started = time.perf_counter()
        try:
            answer = case.call(base_url=self._url, session=self._session, timeout=ANSWER_TIMEOUT_S)
        except requests.RequestException as error:
            self.report.add_foreign(f"{label}: {error!r}\n  {_written(case)}")
            return
        if not self._processes["tritonserver"].is_running():
            self.report.add_foreign(f"{label}: {answer.status_code} and the server has ended\n  {_written(case)}")
            self._find_server()
        row.longest_s = max(row.longest_s, time.perf_counter() - started)
        row.statuses[answer.status_code] += 1
        fault = self._fault_of(case, answer)
        if fault:
            self.report.add_foreign(f"{label}: {answer.status_code} {fault}\n  {answer.text[:300]}\n  {_written(case)}")

    def _fault_of(self, case: Case, answer: Answer) -> str:
        """What is wrong with an answer; empty when nothing is."""
        status = answer.status_code
        if status >= 400 and case.method != "HEAD" and not _is_error_body(answer):
            return "has another body than {'error': one line}"
        named = next((each for each in self._named if status in each.statuses and each.is_met(case, answer)), None)
        if case.method.lower() != case.operation.method and named is None:  # a method that is not there
            allowed = answer.headers.get("allow", [""])[0]
            return "" if status == 405 and allowed and case.method not in allowed else "should be 405 with `Allow`"
        is_declared = str(status) in case.operation.responses.status_codes
        if status >= 500:
            if named is None or named not in SERVER_ERRORS:
                return "is a server error without a reason"
            self.report.named[named.name] += 1
        if status == 200 and answer.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            return self._fault_of_events(answer, is_generator=_model_of(case) == GENERATOR)
        try:
            if is_declared:
                case.validate_response(answer, checks=_CHECKS)
                return ""
        except (FailureGroup, Failure) as failure:
            if named is None:
                return f"is not as declared: {failure}"
        if named is None:
            return "is not declared"
        if status < 500:
            self.report.named[named.name] += 1
        return ""

    def _fault_of_events(self, answer: Answer, *, is_generator: bool) -> str:
        """schemathesis holds an event itself, and not its data, against the schema; so that is done here."""
        *events, rest = answer.content.split(b"\n\n")
        schemas = self._document["components"]["schemas"]
        try:
            assert not rest
            for event in events:
                assert event.startswith(b"data: ")
                data = json.loads(event.removeprefix(b"data: "))
                name = "Error" if "error" in data and "Error" in schemas else "GenerateStreamResponse"
                if name in schemas and is_generator:
                    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
                    jsonschema.validate(data, root)
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            return f"has an event that is not as declared: {error!r}"
        return ""


def _is_error_body(answer: Answer) -> bool:
    try:
        document = json.loads(answer.content)
    except ValueError:
        return False
    is_health = document in ({"live": False}, {"ready": False})
    return is_health or (
        list(document) == ["error"] and isinstance(document["error"], str) and "\n" not in document["error"]
    )


def _written(case: Case) -> str:
    try:
        return str(case.as_curl_command())
    except Exception as error:  # it is for readers alone
        return f"{case!r} ({error})"


@contextlib.contextmanager
def settings_put_back(url: str, session: requests.Session) -> Iterator[None]:
    """Afterwards the settings and the loaded models are what they were."""
    paths = ("/v2/logging", "/v2/trace/setting")

    def ready() -> Any:
        return session.post(f"{url}/v2/repository/index", json={"ready": True}, timeout=ANSWER_TIMEOUT_S).json()

    before = {path: session.get(url + path, timeout=ANSWER_TIMEOUT_S).json() for path in paths}
    models = ready()
    try:
        yield
    finally:
        for verb in ("unload", "load"):
            session.post(f"{url}/v2/repository/models/{SPARE}/{verb}", timeout=ANSWER_TIMEOUT_S).raise_for_status()
        for path, values in before.items():
            own = {key: value for key, value in values.items() if not key.endswith("_file") and key != "trace_mode"}
            session.post(url + path, json=own, timeout=ANSWER_TIMEOUT_S).raise_for_status()
        for path, values in before.items():
            assert session.get(url + path, timeout=ANSWER_TIMEOUT_S).json() == values
        assert ready() == models


def own_schema(front: SchemaFront) -> Document:
    """The front's own document."""
    document: Document = requests.get(f"{front.url}/openapi.json", timeout=ANSWER_TIMEOUT_S).json()
    return document


def main() -> None:
    """Run both schemas and print the accounts; fails when something is foreign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schema", choices=["own", "open-inference", "both"], default="both")
    chosen = parser.parse_args()
    num_foreign = 0
    with running_schema_front() as front:
        published = open_inference_schema()
        documents = []
        if chosen.schema != "open-inference":
            documents.append(("our own /openapi.json", own_schema(front), SERVER_ERRORS))
        if published is None:
            print(f"without the Open Inference Protocol's schema: {SCHEMAS_VARIABLE} is not set")
        elif chosen.schema != "own":
            documents.append(("the Open Inference Protocol", published, OPEN_INFERENCE))
        for title, document, named in documents:
            started = time.perf_counter()
            report = Fuzz(front, document, named).run(chosen.requests, seed=chosen.seed)
            print(
                f"\n{title}: {report.num_requests} requests, {time.perf_counter() - started:.0f} s, seed {chosen.seed}"
            )
            print("\n".join(report.lines()), flush=True)
            num_foreign += report.num_foreign
        assert front.process.is_running()
    sys.exit(1 if num_foreign else 0)


if __name__ == "__main__":
    main()
