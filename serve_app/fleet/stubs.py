"""The python backend's stub processes: who they are, and how many a model needs. Triton itself does not watch them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from serve_app.fleet.guard import children_of

STUB_NAME = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Stub:
    """One running stub.

    Attributes:
        pid: Process id.
        instance: Name of the model instance it runs, as in `digits_0_0`: the instance group's name and a number.
        model_path: The Python file it runs: the model's own, or that of a python-based backend.
        shm_name: Its entry in `/dev/shm`.
    """

    pid: int
    instance: str
    model_path: str
    shm_name: str


def parse_stub(pid: int, cmdline: list[str]) -> Stub | None:
    """The stub with this command line; `None` for other processes, and for zombies, which have none.

    The arguments are fixed by Triton (python_backend, stub_launcher.cc): model path, shared memory name, its two
    sizes, the server's process id, the backend's folder, an offset, the instance's name, the runtime.
    """
    if len(cmdline) < 9 or not cmdline[0].endswith(STUB_NAME):
        return None
    return Stub(pid, cmdline[8], cmdline[1], cmdline[2])


def find_stubs(server_pid: int) -> list[Stub]:
    """Living stubs of a server. Blocks: reads all of `/proc`, some milliseconds for a thousand processes."""
    stubs = []
    for pid in children_of(server_pid):
        with contextlib.suppress(psutil.Error):
            stub = parse_stub(pid, psutil.Process(pid).cmdline())
            if stub is not None:
                stubs.append(stub)
    return stubs


def is_running(pid: int, parent: int) -> bool:
    """Whether `pid` is a living child of `parent`; a zombie is not. Cheap: reads one file."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return False
    return fields[0] not in (b"Z", b"X") and int(fields[1]) == parent


def model_of(stub: Stub, instance_groups: Mapping[str, Iterable[str]]) -> str | None:
    """The model whose instance a stub runs.

    Args:
        stub: A stub.
        instance_groups: Names of the instance groups of each loaded model, from its `ModelConfig`. A group is
            named after its model (`digits_0`) unless the config names it.

    Returns:
        The model's name; `None` where no model, or more than one, has such a group.
    """
    group = stub.instance.rpartition("_")[0]
    owners = [model for model, groups in instance_groups.items() if group in groups]
    if len(owners) > 1:
        folders = Path(stub.model_path).parts
        owners = [model for model in owners if model in folders]
    return owners[0] if len(owners) == 1 else None


def num_instances(config: Any) -> int:
    """How many instances a model has by its `ModelConfig`, each with a stub of its own; on each GPU of a group."""
    return sum(group.count * max(len(group.gpus), 1) for group in config.instance_group)
