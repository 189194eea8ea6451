"""A client of `frame_reply_handler`: one request, answered by frames."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc import aio

from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import _cancelled_by_call, _status, decode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def read_frames(
    channel: aio.Channel, method: str, request: bytes
) -> AsyncIterator[memoryview]:
    """Call `method` and yield the frames of the answer. Raises StreamClosed when it breaks off.

    The caller may cancel the generator, or leave it early inside `contextlib.aclosing`.
    """
    ask: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
    call = ask(request)
    try:
        async for message in call:
            yield decode_frame(message)
    except aio.AioRpcError as error:
        raise StreamClosed(_status(error), clean=False) from error
    except asyncio.CancelledError:
        if not _cancelled_by_call():
            raise
        raise StreamClosed("the channel was closed here", clean=False) from None
    finally:
        call.cancel()
