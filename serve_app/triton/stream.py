"""One request to Triton whose answer is a stream: zero to many responses of one `ModelStreamInfer` call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from serve_app.errors import DeadlineExceeded, EndpointUnavailable
from serve_app.triton.cancellation import is_task_cancelled
from serve_app.triton.status import CallContext, code_of, translate

METADATA = (("triton_grpc_error", "true"),)
"""Makes Triton end the call with a status where the model fails, instead of sending a text without one."""


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
            timer.cancel()
            if answer.error_message:
                raise translate(code_of(answer.error_message), answer.error_message, context)
            yield answer.infer_response
            timer = loop.call_later(response_timeout_s, expire)
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise translate(code, await call.details(), context)
    except grpc.aio.AioRpcError as error:
        raise translate(error.code(), error.details(), context) from None
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        if call.done():  # writing to a call that has ended says no more than that
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise translate(code, await call.details(), context) from None
        raise EndpointUnavailable(context.endpoint, f"grpc could not carry the call: {error}") from None
    except asyncio.CancelledError:
        if has_expired and not is_task_cancelled():
            raise DeadlineExceeded(f"waiting for a response of {context.model}", response_timeout_s) from None
        raise
    finally:
        timer.cancel()
        if not call.done():
            call.cancel()
