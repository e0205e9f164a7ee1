"""Every setting, its unit, its default and the reason for it. The only module that reads the environment.

`ModelServerArgs` and `TritonServerArgs` are the `args:` of the two app builders in `deployments.yaml`; a change
there replaces replicas. `ModelServerConfig` is the front's `user_config:`; a change there is applied in place.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MIB = 1024 * 1024

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BatchingMode(str, Enum):
    """How requests for a model come together before they go to Triton."""

    SERVE_BATCH = "serve_batch"
    """Ray Serve's `@serve.batch` collects a window's requests and hands them to the dispatcher."""

    CONTINUOUS = "continuous"
    """Requests go to the dispatcher one by one; what waits there when a permit is free becomes a batch."""

    OFF = "off"
    """Every request is its own ModelInfer."""


class BatchingSettings(Settings):
    """Micro-batching of one model in front of Triton.

    Attributes:
        mode: See `BatchingMode`.
        max_batch_rows: Most rows in one ModelInfer; the model's own `max_batch_size` when not set, and never
            more than that.
        max_batch_bytes: Most bytes of input tensors in one ModelInfer; one larger row goes alone.
        window_s: How long `serve_batch` waits for company while other batches are in flight. A request that
            finds its model idle never waits.
        max_batches_in_flight: Permits per endpoint: ModelInfer calls under way at once. Default: one more
            than the model's instances, so that the next batch waits in Triton's queue, not on the network.
    """

    mode: BatchingMode = BatchingMode.SERVE_BATCH
    max_batch_rows: int | None = Field(default=None, ge=1)
    max_batch_bytes: int = Field(default=16 * MIB, ge=1)
    window_s: float = Field(default=0.0, ge=0.0, le=10.0)
    max_batches_in_flight: int | None = Field(default=None, ge=1, le=1024)


class QueueSettings(Settings):
    """What may wait for one model on one replica; beyond it requests are refused with 429.

    Attributes:
        max_requests: Requests waiting for a permit.
        max_rows: Rows waiting.
        max_bytes: Bytes of input tensors waiting.
        max_wait_s: Longest time to an answer, as far as it can be foreseen from what waits and from how long batches
            take; what would take longer is refused at once. A request's own budget is such a bound in any case.
        default_priority: Of requests that name none, or 0. As in Triton 1 goes first, and each number before all
            higher ones; so 1 to 9 are more urgent than a plain request, and 11 and above less.
    """

    max_requests: int = Field(default=4096, ge=1)
    max_rows: int = Field(default=65536, ge=1)
    max_bytes: int = Field(default=512 * MIB, ge=1)
    max_wait_s: float | None = Field(default=None, gt=0.0)
    default_priority: int = Field(default=10, ge=1)


class ModelSettings(Settings):
    """Settings of one model on one ModelServer replica.

    Attributes:
        batching: Micro-batching.
        queue: Bounds of what waits.
        timeout_s: Budget of a request that brings no deadline of its own; in a stream of a decoupled model, of each
            response.
        max_streams: Streams of a decoupled model under way at once on one replica; beyond it requests are refused
            with 429. Each holds one of the channels' calls, so it is best well below their number.
        hedge_after_s: How long an answer is waited for before the same request goes to a second server too, where
            there is one; the first answer counts and the other call is cancelled. Only for models that may run a
            request twice; such copies come out of the budget of retries (one for ten requests). Not set: never.
    """

    batching: BatchingSettings = BatchingSettings()
    queue: QueueSettings = QueueSettings()
    timeout_s: float = Field(default=30.0, gt=0.0)
    max_streams: int = Field(default=64, ge=1)
    hedge_after_s: float | None = Field(default=None, gt=0.0)


class ReplicaSettings(Settings):
    """What one replica takes on over all models; beyond it requests are refused with 429.

    Attributes:
        max_requests: Requests under way: being received, waiting or with Triton. Nearly two models may fill their
            default queues. Keep it below Ray Serve's `max_ongoing_requests` (8192): beyond that even health calls wait.
        max_bytes: Bytes of their bodies, messages and tensors. Twice the largest request; memory is about four times
            that at worst, since tensors are copied on their way.
    """

    max_requests: int = Field(default=8000, ge=1)
    max_bytes: int = Field(default=2048 * MIB, ge=1)


class ModelServerConfig(Settings):
    """`user_config` of a ModelServer; applied in place, without a restart.

    Attributes:
        default: Settings of every model that is not named in `models`.
        models: Settings by model name; a model named here takes nothing from `default`.
        replica: Bounds over all models.
        lanes: Priorities by the `lane` of API keys: that of requests which name no `priority`, and the most urgent one
            that the others may name. Keys in a lane that is not here have the model's `default_priority` as theirs;
            keys without a lane, and handle calls, may name any priority.
    """

    default: ModelSettings = ModelSettings()
    models: dict[Name, ModelSettings] = {}
    replica: ReplicaSettings = ReplicaSettings()
    lanes: dict[Name, Annotated[int, Field(ge=1)]] = {}

    def for_model(self, model_name: str) -> ModelSettings:
        """The settings in force for a model."""
        return self.models.get(model_name, self.default)


class TlsSettings(Settings):
    """TLS to Triton servers of your own; PEM files, on every node that runs a replica, relative to `SERVE_APP_HOME`.

    Attributes:
        root_certificates: Whom to believe; whom the machine believes when not set.
        client_certificate: What this client shows of itself (mutual TLS), with the certificates that sign it.
        client_key: Its private key.
        server_name: The name that the server's certificate must have, where it is not the address's.
        reload_interval_s: How often the files are looked at. Changed ones are used for new connections, which take the
            place of the old ones without a lost request.
    """

    root_certificates: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
    server_name: str | None = None
    reload_interval_s: float = Field(default=10.0, gt=0.0)

    @model_validator(mode="after")
    def _check(self) -> TlsSettings:
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key belong together")
        return self


class ChannelSettings(Settings):
    """gRPC channels from one replica to one endpoint.

    Attributes:
        num_channels: Channels, each a TCP connection (or unix socket) of its own.
        max_calls_per_channel: Calls under way on one channel; more wait, first come first served.
        max_message_bytes: Largest message sent or received; gRPC's own default of 4 MB is too small.
        initial_reconnect_backoff_s: First pause after a lost connection; also the shortest.
        max_reconnect_backoff_s: Longest pause; gRPC's own default of 120 s outlasts any restart.
        keepalive_time_s: Pings on a channel with calls under way. Triton's default policy answers pings more
            often than every 300 s with GOAWAY.
        connect_timeout_s: How long warm-up waits for a first connection.
        tls: Encrypts, and checks who is there; plain TCP when not set.
    """

    num_channels: int = Field(default=2, ge=1, le=64)
    max_calls_per_channel: int = Field(default=64, ge=1)
    max_message_bytes: int = Field(default=2**31 - 1, ge=1 * MIB, le=2**31 - 1)
    initial_reconnect_backoff_s: float = Field(default=0.1, gt=0.0)
    max_reconnect_backoff_s: float = Field(default=0.5, gt=0.0)
    keepalive_time_s: float = Field(default=330.0, ge=300.0)
    connect_timeout_s: float = Field(default=5.0, gt=0.0)
    tls: TlsSettings | None = None


class LimitSettings(Settings):
    """Sizes beyond which a request is refused before it is read in full.

    Attributes:
        max_request_bytes: HTTP body or gRPC message, unpacked.
        max_inputs: Tensors in one request.
        max_rank: Dimensions of one tensor.
        max_json_bytes: The JSON part of a request.
    """

    max_request_bytes: int = Field(default=1024 * MIB, ge=1)
    max_inputs: int = Field(default=256, ge=1)
    max_rank: int = Field(default=32, ge=1)
    max_json_bytes: int = Field(default=256 * MIB, ge=1)


class AuthSettings(Settings):
    """Who may call over HTTP and gRPC; handle calls from inside the cluster are trusted.

    With neither a file nor a variable named, everyone who reaches the address may do everything.

    Attributes:
        keys_file: File of keys (see `serve-app keys`), on every node that runs a replica; a relative path is taken
            from `SERVE_APP_HOME`. Changes of its content are in force within `reload_interval_s`.
        keys_env: Environment variable of the replicas that holds the content of such a file instead; read once.
        allow_anonymous: With no keys: say that this is meant, so that `serve-app up` listens on an address which
            other machines can reach.
        is_health_open: Whether the server's liveness and readiness are told without a key, as probes need it.
        reload_interval_s: How often the file is looked at, while requests come.
    """

    keys_file: str | None = None
    keys_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    allow_anonymous: bool = False
    is_health_open: bool = True
    reload_interval_s: float = Field(default=1.0, ge=0.0, le=3600.0)

    @model_validator(mode="after")
    def _check(self) -> AuthSettings:
        if self.keys_file is not None and self.keys_env is not None:
            raise ValueError("keys_file and keys_env are both set; keys come from one place")
        if self.is_on and self.allow_anonymous:
            raise ValueError("allow_anonymous contradicts the keys that are named")
        return self

    @property
    def is_on(self) -> bool:
        """Whether callers need a key."""
        return self.keys_file is not None or self.keys_env is not None


class ModelServerArgs(Settings):
    """`args:` of `serve_app.deployments.apps:model_server`.

    Attributes:
        endpoints: Triton gRPC addresses (`host:port`, `dns:///name:port` for every address behind a name, or
            `unix:/path`). Empty: endpoints come from the EndpointRegistry that the fleet feeds.
        registry: Name of the EndpointRegistry actor; must match the fleet's.
        models: Models served; empty means every model that the endpoints have.
        resolve_interval_s: How often `dns:///` names are looked up again.
        channels: gRPC channels to each endpoint.
        limits: Sizes beyond which requests are refused.
        auth: Who may call.
        allow_client_shm: Let clients register system shared memory, as Triton's `--allow-client-shm` does (which Triton
            servers that know this option need as well: `extra_arguments: ["--allow-client-shm=true"]`). It opens the
            node's memory: whoever may make control calls here can have Triton map any POSIX shared memory on its node
            by name, whosever it is, and can then read and write it by inference. Only for clients that you trust
            with all of `/dev/shm`, on the node of a Triton server; useless to all others.
    """

    endpoints: list[str] = []
    registry: Name = "endpoint-registry"
    models: list[Name] = []
    resolve_interval_s: float = Field(default=5.0, gt=0.0)
    channels: ChannelSettings = ChannelSettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()
    allow_client_shm: bool = False

    @model_validator(mode="after")
    def _check(self) -> ModelServerArgs:
        if self.channels.tls is not None and not self.endpoints:
            raise ValueError("channels.tls is for servers named in `endpoints`; those of the fleet do not speak TLS")
        return self


class RestartSettings(Settings):
    """How a tritonserver that ended by itself is started again.

    Attributes:
        initial_backoff_s: Pause before the first restart; doubles each time.
        max_backoff_s: Longest pause.
        reset_after_s: A server that lived this long starts anew with the first pause.
        max_restarts: Restarts without such a life before the replica reports itself unhealthy.
    """

    initial_backoff_s: float = Field(default=0.1, ge=0.0)
    max_backoff_s: float = Field(default=10.0, gt=0.0)
    reset_after_s: float = Field(default=60.0, gt=0.0)
    max_restarts: int = Field(default=8, ge=0)


class TritonServerArgs(Settings):
    """`args:` of `serve_app.deployments.apps:triton_fleet`.

    Attributes:
        model_repository: Folder of models; a relative path is taken from `SERVE_APP_HOME`.
        models: Models loaded at start; empty means every model in the repository.
        registry: Name of the EndpointRegistry actor in which endpoints are leased.
        tritonserver: Path of the binary; found by `fleet.runtime` when not set.
        num_replicas: Servers in the fleet.
        num_cpus: CPUs that Ray reserves for one server.
        num_gpus: GPUs that Ray gives one server.
        transport: Where a server's gRPC listens: `tcp` on the node's address and a free port, or `unix`, a socket
            that only replicas on the same node can reach.
        allow_http: Open Triton's own HTTP endpoint on a free port of 127.0.0.1 too, for looking at it by hand. An
            idle keep-alive connection to it delays the server's stop by `stop_timeout_s`.
        restrict_admin: Have the server refuse loads, unloads, shared memory, trace and log settings to whoever does not
            show a secret that is made for each of its lives and known to the front alone.
        start_timeout_s: How long a server may take to become ready.
        stop_timeout_s: `--exit-timeout-secs`, after which a stopping server gives up on what still runs.
        drain_s: Pause between leaving the registry and asking the server to stop, in which replicas learn of it.
        unresponsive_timeout_s: A server that answers no probe for so long is killed and started again.
        lease_s: How long an endpoint stays in the registry without a heartbeat.
        restart: How a server that ended is started again.
        log_verbose: `--log-verbose`; 0 logs starts, stops, loads and errors, 1 and more log every request.
        max_log_bytes: Size at which a server's log file is moved aside (one older file is kept).
        extra_arguments: More command-line arguments for tritonserver, as they are.
    """

    model_repository: str = "model_repository"
    models: list[Name] = []
    registry: Name = "endpoint-registry"
    tritonserver: str | None = None
    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)
    transport: Literal["tcp", "unix"] = "tcp"
    allow_http: bool = False
    restrict_admin: bool = True
    start_timeout_s: float = Field(default=120.0, gt=0.0)
    stop_timeout_s: int = Field(default=8, ge=1)
    drain_s: float = Field(default=0.5, ge=0.0)
    unresponsive_timeout_s: float = Field(default=20.0, gt=0.0)
    lease_s: float = Field(default=3.0, gt=0.0)
    restart: RestartSettings = RestartSettings()
    log_verbose: int = Field(default=0, ge=0, le=9)
    max_log_bytes: int = Field(default=16 * MIB, ge=64 * 1024)
    extra_arguments: list[str] = []


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that relative paths in `deployments.yaml` are taken from.

    `SERVE_APP_HOME` where it is set (by `cluster/serve.env`), else the process's working directory.
    """
    return Path(environ.get("SERVE_APP_HOME") or Path.cwd())


def resolve_path(path: str, environ: Mapping[str, str] = os.environ) -> Path:
    """An absolute path for a path from the settings; see `home`."""
    return (home(environ) / Path(path).expanduser()).resolve()


def state_dir() -> Path:
    """Where this node's tritonservers keep their logs and sockets: a folder of this user in the temporary folder."""
    return Path(tempfile.gettempdir()) / f"serve-app-triton-{os.getuid()}"


def handle_message_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Largest message of a handle call by value, as Ray Serve reads it from the environment.

    Four MiB, gRPC's own default, unless `RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH` says otherwise (as
    `cluster/serve.env` does, for both sides).
    """
    text = environ.get("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", "")
    return int(text) if text.isdigit() else 4 * MIB


class LauncherSettings(Settings):
    """How `serve-app` runs a Ray of its own on this machine; each has an environment variable `SERVE_APP_<NAME>`.

    Attributes:
        host: Address that HTTP listens on; `http_options.host` of the file, else 127.0.0.1, when not set.
        http_port: `http_options.port` of the file, else 8000, when not set.
        grpc_port: `grpc_options.port` of the file, else 9000, when not set.
        dashboard_port: Ray's dashboard and its REST API on 127.0.0.1, which `serve deploy` uses.
        run_dir: Folder of the running instance: Ray's session, sockets, state. One instance per folder, and a short
            path, since a unix socket's has at most 107 bytes. Default: `/tmp/serve-app-<user id>`.
        num_cpus: CPUs that Ray schedules with. They are bookkeeping, not cores: a replica that reserves one and
            mostly waits needs no core of its own, so a laptop with two gets at least 8.
        object_store_bytes: Ray's object store in `/dev/shm`; holds tensors that handles pass by reference.
        start_timeout_s: From the start of Ray until every model is ready.
        stop_timeout_s: How long replicas may take to finish what they do before they are killed.
    """

    host: str | None = None
    http_port: int | None = Field(default=None, ge=1, le=65535)
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    dashboard_port: int = Field(default=8265, ge=1, le=65535)
    run_dir: str | None = None
    num_cpus: int = Field(default_factory=lambda: max(8, os.cpu_count() or 1), ge=1)
    object_store_bytes: int = Field(default=512 * MIB, ge=128 * MIB)
    start_timeout_s: float = Field(default=300.0, gt=0.0)
    stop_timeout_s: float = Field(default=20.0, gt=0.0)


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for what starts other processes."""
    return dict(os.environ)
