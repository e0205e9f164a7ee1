"""System shared memory of `FakeTriton`: registered regions, tensors read from them and written to them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.protocol.messages import REGION, REGION_OFFSET, REGION_SIZE
from serve_app.triton.fake_model import Failure

if TYPE_CHECKING:
    from serve_app.triton.fake import FakeTriton

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, not a place for temporary files


@dataclass
class FakeRegions:
    """Regions by name, and how calls about them end.

    Attributes:
        registered: `SystemSharedMemoryRegisterRequest` of each.
        num_busy: How many of the next unregistrations end as if a request still held the region.
        is_elsewhere: Whether the server is on a machine without the memory: it can open no key.
    """

    registered: dict[str, Any] = field(default_factory=dict)
    num_busy: int = 0
    is_elsewhere: bool = False

    def register(self, request: Any) -> Failure | None:
        """Enter a region; why not, if so."""
        if request.name in self.registered:
            text = f"shared memory region '{request.name}' already in manager"
            return Failure(grpc.StatusCode.ALREADY_EXISTS, text)
        path = SHARED_MEMORY / request.key.lstrip("/")
        if self.is_elsewhere or not request.key.strip("/") or not path.is_file():
            return Failure(grpc.StatusCode.INTERNAL, f"Unable to open shared memory region: '{request.key}'")
        if not 0 < request.offset + request.byte_size <= path.stat().st_size:
            text = f"failed to register shared memory region '{request.name}': invalid args"
            return Failure(grpc.StatusCode.INVALID_ARGUMENT, text)
        self.registered[request.name] = request
        return None

    def read(self, request: Any) -> Failure | None:
        """Put what inputs have in regions into the request itself; check the regions of outputs."""
        contents, raw = [], iter(list(request.raw_input_contents))
        for tensor in [*request.inputs, *request.outputs]:
            is_input = hasattr(tensor, "shape")
            if REGION not in tensor.parameters:
                contents += [next(raw)] if is_input else []
                continue
            found = self._find(tensor)
            if isinstance(found, Failure):
                return found
            path, start, stop = found
            if is_input:
                contents.append(path.read_bytes()[start:stop])
        del request.raw_input_contents[:]
        request.raw_input_contents.extend(contents)
        return None

    def write(self, request: Any, answer: Any) -> Failure | None:
        """Move the data of outputs that were asked for in regions to there."""
        wanted = {output.name: output for output in request.outputs if REGION in output.parameters}
        for index, output in enumerate(answer.outputs):
            if output.name not in wanted:
                continue
            found, data = self._find(wanted[output.name]), answer.raw_output_contents[index]
            if isinstance(found, Failure):
                return found
            path, start, stop = found
            if stop - start < len(data):
                text = (
                    f"shared memory size specified with the request for output '{output.name}' ({stop - start} bytes) "
                    f"should be at least {len(data)} bytes to hold the results"
                )
                return Failure(grpc.StatusCode.INTERNAL, text)
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[start : start + len(data)] = data
            answer.raw_output_contents[index] = b""
        return None

    def _find(self, tensor: Any) -> Failure | tuple[Path, int, int]:
        name = tensor.parameters[REGION].string_param
        region = self.registered.get(name)
        if region is None:
            return Failure(grpc.StatusCode.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        size, offset = (tensor.parameters[key].int64_param for key in (REGION_SIZE, REGION_OFFSET))
        if offset + size > region.byte_size:
            text = f"Invalid offset + byte size for shared memory region: '{name}'"
            return Failure(grpc.StatusCode.INVALID_ARGUMENT, text)
        start = region.offset + offset
        return SHARED_MEMORY / region.key.lstrip("/"), start, start + size


class FakeRegionServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, untyped
    """The RPCs; method names and signatures are the generated ones."""

    _fake: FakeTriton

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["SystemSharedMemoryStatus"] += 1
        answer = service_pb2.SystemSharedMemoryStatusResponse()
        for name, region in self._fake.regions.registered.items():
            if request.name in ("", name):
                status = answer.regions[name]
                status.name, status.key = name, region.key
                status.offset, status.byte_size = region.offset, region.byte_size
        if request.name and not answer.regions:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"Unable to find system shared memory region: '{request.name}'")
        return answer

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["SystemSharedMemoryRegister"] += 1
        failure = self._fake.regions.register(request)
        if failure is not None:
            context.set_code(failure.code)
            context.set_details(failure.text)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["SystemSharedMemoryUnregister"] += 1
        regions = self._fake.regions
        if regions.num_busy:
            regions.num_busy -= 1
            context.set_code(grpc.StatusCode.INTERNAL)
            context.set_details(f"Cannot unregister shared memory region '{request.name}', it is currently in use.")
        elif request.name:
            regions.registered.pop(request.name, None)
        else:
            regions.registered.clear()
        return service_pb2.SystemSharedMemoryUnregisterResponse()
