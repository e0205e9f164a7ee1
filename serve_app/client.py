"""A typed client over Ray Serve's Python handle: plain calls, awaits, and futures with callbacks.

It hides the handle's options (by value for small tensors, through the object store for large ones), turns timeouts
into cancelled requests, and raises our errors as they were raised in the replica.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.exceptions import TaskCancelledError as RayTaskCancelled
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from serve_app import settings
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    Overloaded,
    PoolClosed,
    RequestCancelled,
    ServeAppError,
    Unsupported,
)
from serve_app.protocol.messages import Arrays, ParameterValue

logger = logging.getLogger(__name__)

InferFuture = concurrent.futures.Future[Arrays]

# Room for names, shapes and pickle's framing beside the tensors of a call by value.
_FRAMING_BYTES = 64 * 1024


class ModelClient:
    """Calls models through the handle of a `models` app; `with` or `async with`.

    Safe to use from several threads and event loops. Connecting needs a Ray that is initialised.

    Args:
        app_name: The Serve app of the ModelServer deployment.
        timeout_s: Budget of a call that names none; `None` leaves it to the model's settings.
    """

    def __init__(self, app_name: str = "models", *, timeout_s: float | None = None) -> None:
        self._app_name = app_name
        self._timeout_s = timeout_s
        self._by_value_below = settings.handle_message_bytes() - _FRAMING_BYTES
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # A handle's router may be bound to the loop of its first call, so each loop has its own, until it is closed.
        self._handles: dict[asyncio.AbstractEventLoop, DeploymentHandle[Any]] = {}

    # --- calls --------------------------------------------------------------------------------------------

    def infer(self, model_name: str, inputs: Mapping[str, npt.ArrayLike], **options: Any) -> Arrays:
        """Run a model and wait for the answer.

        Args:
            model_name: The model.
            inputs: Arrays by input name, rows first where the model batches; `str` and `bytes` elements become
                `BYTES`.
            **options: As for `submit`.

        Returns:
            Arrays by output name; they may be read-only.

        Raises:
            DeadlineExceeded: The budget ran out; the request was cancelled.
            Unsupported: It is called in a callback, whose thread would wait for itself.
            ServeAppError: Any other error of the replica, as it was raised there.
        """
        if threading.current_thread() is self._thread:
            raise Unsupported("infer in a callback", "the answer would come in this very thread; use submit")
        future = self.submit(model_name, inputs, **options)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RequestCancelled from None
        except BaseException:
            future.cancel()  # the caller was interrupted: nobody waits for the answer any more
            raise

    async def ainfer(self, model_name: str, inputs: Mapping[str, npt.ArrayLike], **options: Any) -> Arrays:
        """`infer` for coroutines; cancelling it cancels the request."""
        return await self._call(model_name, inputs, **options)

    async def stream(
        self, model_name: str, inputs: Mapping[str, npt.ArrayLike], **options: Any
    ) -> AsyncGenerator[Arrays, None]:
        """Run a model and give its responses as they come: any number for a decoupled model, one for every other.

        Leaving the iteration early cancels the model's work at once if it is done inside `contextlib.aclosing`.

        Args:
            model_name: The model.
            inputs: As for `infer`.
            **options: As for `submit`, without a callback. A `timeout_s` is the budget of all responses together; when
                there is none, each has the model's setting.

        Yields:
            Arrays by output name; they may be read-only.

        Raises:
            ServeAppError: Any error of the replica, as it was raised there, before or after some responses.
        """
        if options.get("timeout_s") is None:
            options["timeout_s"] = self._timeout_s
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        with self._our_errors(options["timeout_s"]):
            handle = self._handle().options(stream=True, _by_reference=not self._is_small(arrays))
            responses: Any = handle.stream.remote(model_name, arrays, **options)
            is_done = False
            try:
                async for response in responses:
                    yield response
                is_done = True
            finally:
                if not is_done:
                    responses.cancel()

    def submit(
        self,
        model_name: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        model_version: str = "",
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        callback: Callable[[InferFuture], object] | None = None,
    ) -> InferFuture:
        """Start a request and return at once.

        Args:
            model_name: The model.
            inputs: As for `infer`; not to be changed before the future is done.
            model_version: Empty for the server's choice.
            outputs: Names wanted, all when `None`.
            parameters: V2 request parameters.
            request_id: Echoed to Triton.
            timeout_s: Budget in seconds, the client's when `None`.
            callback: Called exactly once with the future when it is done, however it ends, in a thread of the
                client's. What it raises is logged.

        Returns:
            A future; `cancel()` cancels the request itself.
        """
        call = self._call(
            model_name,
            inputs,
            model_version=model_version,
            outputs=outputs,
            parameters=parameters,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        try:
            with self._lock:  # so that `close` comes before this or after it, and ends what it finds
                future = asyncio.run_coroutine_threadsafe(call, self._own_loop())
        except BaseException:
            call.close()
            raise
        if callback is not None:
            future.add_done_callback(_guarded(callback))
        return future

    # --- life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what is under way and end the client's thread."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            self._handles.clear()
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> ModelClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> ModelClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<ModelClient {self._app_name!r} [{state}]>"

    # --- inside -------------------------------------------------------------------------------------------

    async def _call(
        self,
        model_name: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Arrays:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        options["timeout_s"] = timeout_s
        with self._our_errors(timeout_s):
            if self._is_small(arrays):
                try:
                    return await self._send(model_name, arrays, by_reference=False, **options)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    # The answer is too large to travel by value; the object store has no such limit.
            return await self._send(model_name, arrays, by_reference=True, **options)

    def _is_small(self, arrays: Arrays) -> bool:
        return sum(_pickled_bytes(array) for array in arrays.values()) <= self._by_value_below

    @contextlib.contextmanager
    def _our_errors(self, timeout_s: float | None) -> Iterator[None]:
        """Raise Ray's errors as ours."""
        try:
            yield
        except asyncio.TimeoutError:
            raise DeadlineExceeded("waiting for the replica's answer", timeout_s or 0.0) from None
        except RayTaskError as error:
            raise _cause_of(error) from None
        except RayTaskCancelled:
            raise RequestCancelled from None
        except RequestCancelledError:
            raise RequestCancelled from None
        except BackPressureError as error:
            raise Overloaded(f"app {self._app_name!r}", str(error).splitlines()[0]) from None
        except (RayActorError, DeploymentUnavailableError) as error:
            raise EndpointUnavailable(f"app {self._app_name!r}", str(error).splitlines()[0]) from None
        except grpc.aio.AioRpcError as error:
            raise EndpointUnavailable(f"app {self._app_name!r}", f"{error.code().name} from its replica") from None
        except (RayError, RayServeException) as error:  # an app that is not there, a lost object, ...
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EndpointUnavailable(f"app {self._app_name!r}", reason) from None

    async def _send(self, model_name: str, arrays: Arrays, *, by_reference: bool, **options: Any) -> Arrays:
        handle = self._handle().options(_by_reference=by_reference)
        timeout_s = options["timeout_s"]
        response = handle.infer.remote(model_name, arrays, **options)
        try:
            answer: Arrays = await asyncio.wait_for(_result(response), timeout_s)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            response.cancel()  # type: ignore[no-untyped-call]  # Ray's
            raise
        return answer

    def _handle(self) -> DeploymentHandle[Any]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_closed:
                raise PoolClosed("this client")
            handle = self._handles.get(loop)
            if handle is None:
                for ended in [known for known in self._handles if known.is_closed()]:
                    del self._handles[ended]
                handle = self._handles[loop] = serve.get_app_handle(self._app_name)
            return handle

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The client's own loop, running; called with the lock held."""
        if self._is_closed:
            raise PoolClosed("this client")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="serve-app-client", daemon=True)
            self._thread.start()
        return self._loop


async def _result(response: Any) -> Arrays:
    answer: Arrays = await response
    return answer


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel and await what is left on it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))  # calls handed over before the stop become tasks
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()


def _guarded(callback: Callable[[InferFuture], object]) -> Callable[[InferFuture], None]:
    """A callback whose exceptions are logged under our name and go no further."""

    def call(future: InferFuture) -> None:
        try:
            callback(future)
        except BaseException:  # a `SystemExit` too: it would end the thread, and all other requests with it
            logger.exception("a callback of an inference request raised")

    return call


def _cause_of(error: RayTaskError) -> Exception:
    """Our error inside Ray's wrapper, or one of ours that says no more than the wrapped error's class."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ServeAppError):
        return cause
    if isinstance(cause, asyncio.CancelledError):
        return RequestCancelled()
    return BackendFailed("?", f"{type(cause).__name__} in the replica")


def _pickled_bytes(array: npt.NDArray[Any]) -> int:
    if array.dtype.kind != "O":
        return array.nbytes
    return sum(len(element) + 16 if isinstance(element, (bytes, str)) else 16 for element in array.reshape(-1))
