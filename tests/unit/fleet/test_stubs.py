"""Stubs: read from command lines, matched to models, and missed when they are gone."""

from __future__ import annotations

import os
import subprocess

import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from serve_app.fleet.stubs import Stub, is_running, model_of, num_instances, parse_stub


def cmdline(instance: str, path: str = "/repo/digits/1/model.py") -> list[str]:
    """A stub's arguments, as Triton 24.10 gives them."""
    stub = "/b/python/triton_python_backend_stub"
    return [stub, path, f"serve_app_1_2_3_4_{instance}", "1048576", "1048576", "77", "/b/python", "336", instance, "X"]


def stub(pid: int, instance: str, path: str = "/repo/digits/1/model.py") -> Stub:
    """A stub by its arguments."""
    found = parse_stub(pid, cmdline(instance, path))
    assert found is not None
    return found


def test_command_lines() -> None:
    """The instance, the file and the shared memory are read; other processes and zombies are not taken for stubs."""
    assert stub(5, "digits_0_1") == Stub(5, "digits_0_1", "/repo/digits/1/model.py", "serve_app_1_2_3_4_digits_0_1")
    assert parse_stub(5, []) is None
    assert parse_stub(5, ["/usr/bin/python3", *cmdline("x")[1:]]) is None
    assert parse_stub(5, cmdline("x")[:5]) is None


@pytest.mark.parametrize(
    ("instance", "path", "expected"),
    [
        ("digits_0_3", "/repo/digits/1/model.py", "digits"),
        ("digits_1", "/repo/digits/1/model.onnx", "digits"),
        ("gpu_0", "/repo/named/1/model.py", "named"),
        ("same_0", "/repo/b/2/model.py", "b"),
        ("same_0", "/elsewhere/2/model.py", None),
        ("gone_0_0", "/repo/gone/1/model.py", None),
    ],
)
def test_models(instance: str, path: str, expected: str | None) -> None:
    """A stub belongs to the model that has its instance group; folders decide between models with equal names."""
    groups = {"digits": ["digits_0", "digits"], "named": ["gpu"], "a": ["same"], "b": ["same"]}
    assert model_of(stub(1, instance, path), groups) == expected


def test_instances_are_counted_on_each_device() -> None:
    """The groups' counts, each for every GPU that its group names."""
    groups = [{"count": 2, "kind": "KIND_CPU"}, {"count": 3, "kind": "KIND_GPU", "gpus": [0, 1]}]
    config = json_format.ParseDict({"instance_group": groups}, model_config_pb2.ModelConfig())
    assert num_instances(config) == 8
    assert num_instances(model_config_pb2.ModelConfig()) == 0


def test_running_children() -> None:
    """Only a living child counts: a zombie, a stranger and a free process id do not."""
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(child.pid, os.getpid())
    assert not is_running(child.pid, os.getpid())
    assert is_running(os.getpid(), os.getppid())
    assert not is_running(os.getpid(), 1 if os.getppid() != 1 else 2)
