"""One request to Triton whose answer is a stream: zero to many responses of one `ModelStreamInfer` call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from serve_app.errors import AnswerMalformed, DeadlineExceeded, EndpointUnavailable, ServeAppError
from serve_app.triton.cancellation import is_task_cancelled
from serve_app.triton.status import CallContext, code_of, translate

# Triton's errors come as texts without a status here. With the metadata `triton_grpc_error: true` they would have one,
# but tritonserver 2.51 dies of a decoupled model's error then (signal 11, each time).

ERROR_GRACE_S = 1.0
"""How long a call may take to end by itself after an error, before it is cancelled."""


async def responses(
    call: grpc.aio.StreamStreamCall, message: Any, context: CallContext, *, response_timeout_s: float
) -> AsyncGenerator[Any, None]:
    """Send one request on a new call, and give its responses one by one as they are asked for.

    Nothing is read ahead: while nobody asks, gRPC's flow control makes the server wait. Closing the generator, or
    cancelling who waits in it, cancels the request on the server. Iterate it inside `contextlib.aclosing`.

    Args:
        call: A call of `ModelStreamInfer` on which nothing was written; closed when this ends.
        message: The `ModelInferRequest`.
        context: What the call is, for error texts.
        response_timeout_s: How long one response may take, in seconds; time in which nobody asks does not count.

    Yields:
        Each `ModelInferResponse`.

    Raises:
        DeadlineExceeded: A response took too long, or the call's own deadline has passed.
        ServeAppError: See `status.translate`.
    """
    has_expired = False
    failure: ServeAppError | None = None

    def expire() -> None:
        nonlocal has_expired
        has_expired = True
        call.cancel()

    # A timer rather than `asyncio.wait_for`, which before Python 3.12 can lose a cancellation of its caller.
    loop = asyncio.get_running_loop()
    timer = loop.call_later(response_timeout_s, expire)
    try:
        await call.write(message)
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            if failure is not None:
                continue
            timer.cancel()
            if answer is None:  # grpc's word for bytes that are no such message
                raise AnswerMalformed(context.model_name, "a response of its stream cannot be read")
            if answer.error_message:
                failure = translate(code_of(answer.error_message), answer.error_message, context)
                timer = loop.call_later(ERROR_GRACE_S, expire)
                continue
            yield answer.infer_response
            timer = loop.call_later(response_timeout_s, expire)
        if failure is not None:
            raise failure
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise translate(code, await call.details(), context)
    except grpc.aio.AioRpcError as error:
        raise failure or translate(error.code(), error.details(), context) from None
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        if call.done():  # writing to a call that has ended says no more than that
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise translate(code, await call.details(), context) from None
        raise EndpointUnavailable(context.endpoint, f"grpc could not carry the call: {error}") from None
    except asyncio.CancelledError:
        if has_expired and not is_task_cancelled():
            if failure is not None:
                raise failure from None
            raise DeadlineExceeded(f"waiting for a response of {context.model}", response_timeout_s) from None
        raise
    finally:
        timer.cancel()
        if not call.done():
            call.cancel()
