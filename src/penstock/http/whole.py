"""Short ways through uvicorn for what is there as a whole: a body that came with its head, and an answer with one write.

Uvicorn looks at each header of an answer and writes twice; nearly all headers of the answers that a server writes most, to a PUT
and to a callback, are always the same. And a body that is there need not be waited for, with a timer.
"""

from __future__ import annotations

from starlette.types import Receive, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


def read_whole(receive: Receive) -> bytes | None:
    """The body of a request when all of it has arrived; None: the server is another one, or the body has to be waited for.

    Args:
        receive: As the server gave it.
    """
    cycle = getattr(receive, "__self__", None)
    if (
        type(cycle) is not RequestResponseCycle
        or cycle.more_body
        or cycle.disconnected
        or cycle.response_complete
        or cycle.waiting_for_100_continue
        or not cycle.message_event.is_set()
    ):
        return None
    cycle.flow.resume_reading()
    cycle.message_event.clear()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


def write_whole(send: Send, status: int, head: bytes, body: bytes) -> bool:
    """Answer a request with a head, lines that end with CRLF, and a body.

    Args:
        send: As the server gave it.
        status: The status code.
        head: Header lines, with that of the body's length.
        body: The body.

    Returns:
        Whether it was done. False: the server is another one, or has to be waited for; `send` then.
    """
    cycle = getattr(send, "__self__", None)
    if type(cycle) is not RequestResponseCycle or cycle.response_started or cycle.access_log or cycle.flow.write_paused:
        return False
    if cycle.disconnected:
        return True
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    lines = [STATUS_LINE[status]]
    for name, value in cycle.default_headers:
        lines += (name, b": ", value, b"\r\n")
    lines += (head, b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n", body)
    cycle.transport.write(b"".join(lines))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True
