"""Writes an answer that is there as a whole with one write, where uvicorn would look at each header of it and write twice.

The answers to a PUT and to a callback are what a server writes most, and nearly all of their headers are always the same.
"""

from __future__ import annotations

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


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
