"""`grpc.health.v1` and server reflection on the gRPC port, as probes, gRPC's own clients and grpcurl use them."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.stack import Stack

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "digits"])
def test_what_serves_is_serving(stack: Stack, service: str) -> None:
    """The server, by either of its names, and a model."""
    with grpc.insecure_channel(stack.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
    assert answer.status == SERVING


def test_an_unknown_service_is_not_found(stack: Stack) -> None:
    """The status that the health protocol asks for."""
    with grpc.insecure_channel(stack.grpc) as channel, pytest.raises(grpc.RpcError) as raised:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=20)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "unknown model 'nothing'"


@pytest.mark.parametrize(("service", "status"), [("", SERVING), ("nothing", SERVICE_UNKNOWN)])
def test_a_watch_begins_with_the_status(stack: Stack, service: str, status: int) -> None:
    """At once, and it stays open until the client ends it."""
    with grpc.insecure_channel(stack.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service), timeout=20)
        assert next(watch).status == status
        watch.cancel()


def test_reflection_names_the_services(stack: Stack) -> None:
    """And describes their messages, without any file of theirs on the client's side."""
    with grpc.insecure_channel(stack.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= services
    assert "ModelInfer" in [method.name for method in file.service[0].method]
