"""What `http/protocol.py` uses of uvicorn that is not its interface: a new version is taken on purpose."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.websockets import websockets_sansio_impl

ROOT = Path(__file__).parents[3]
OVERRIDDEN = (
    "connection_made", "connection_lost", "data_received", "on_message_begin", "on_header", "on_headers_complete", "on_body",
    "on_message_complete", "on_response_complete", "pause_writing", "resume_writing", "send_400_response",
)  # fmt: skip
CALLED = ("_unset_keepalive_if_required", "_should_upgrade", "timeout_keep_alive_handler")
ATTRIBUTES = ("connections", "transport", "cycle", "pipeline", "parser", "timeout_keep_alive_task", "timeout_keep_alive", "loop")
OF_A_CYCLE = (
    "response_started", "response_complete", "access_log", "flow", "disconnected", "waiting_for_100_continue", "default_headers",
    "keep_alive", "transport", "message_event", "on_response",
)  # fmt: skip


def test_what_is_used_is_there() -> None:
    protocol = httptools_impl.HttpToolsProtocol
    assert [name for name in (*OVERRIDDEN, *CALLED) if not callable(getattr(protocol, name, None))] == []
    made = inspect.getsource(protocol.__init__) + inspect.getsource(protocol.connection_made)
    assert [name for name in ATTRIBUTES if not re.search(rf"self\.{name}\b", made)] == []
    closing = inspect.getsource(websockets_sansio_impl.WebSocketsSansIOProtocol.shutdown)
    assert "self.handshake_complete" in closing
    assert "self.close_sent" in closing
    assert httptools_impl.STATUS_LINE[431].startswith(b"HTTP/1.1 431")
    cycle = inspect.signature(httptools_impl.RequestResponseCycle.__init__).parameters
    assert {"transport", "keep_alive"} <= set(cycle)
    there = inspect.getsource(httptools_impl.RequestResponseCycle.__init__)
    assert [name for name in OF_A_CYCLE if f"self.{name}" not in there] == []


def test_what_ends_an_answer_is_what_was_known() -> None:
    """`http/whole.py` does what these lines do: when they change it has to be looked at."""
    code = inspect.getsource(httptools_impl.RequestResponseCycle.send)
    known = (
        "self.response_complete = True", "self.message_event.set()", "if not self.keep_alive:", "self.transport.close()",
        "self.on_response()",
    )  # fmt: skip
    ends = code.partition("# Handle response completion")[2].partition("else:")[0]
    assert [line.strip() for line in ends.splitlines() if line.strip()][-len(known) :] == list(known)
    assert code.count("self.waiting_for_100_continue = False") == 1


def test_the_version_has_an_upper_bound() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["http"]
    (uvicorn,) = (one for one in extras if one.startswith("uvicorn"))
    assert re.fullmatch(r"uvicorn>=0\.[0-9]+,<0\.[0-9]+", uvicorn)
