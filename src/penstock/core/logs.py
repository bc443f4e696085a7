"""Logs: what every process writes about an error, and how the processes that Penstock starts configure logging.

The log states *where* an error came from and *which* error it is; the row of the job, the event or the standing job keeps its
message. An exception's message may contain any value that a handler used (a payload, a password), and the local variables of a
frame certainly do. A traceback therefore never shows local variables, and a message appears only when Penstock itself wrote it.
`PENSTOCK_LOG_PAYLOADS`, or the debugging of HTTP traffic, adds the messages.

Every module logs through `get_logger`, which turns exceptions into text before a logging library sees them. A configuration of
the application, such as structlog's own tracebacks with local variables, then has no values to show.

The application decides where its logs go. When it has configured structlog, the events go there, with their fields. Otherwise
they go to the logger "penstock" of the standard library as lines of text; without any configuration, that writes warnings and
errors to standard error and nothing else. `configure` is for processes that Penstock starts: commands, workers, servers,
bridges, Spark's executors.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from penstock.errors import PenstockError

_MOST_CAUSES = 8
_MOST_FRAMES = 50
_payloads = os.environ.get("PENSTOCK_LOG_PAYLOADS", "").lower() in ("1", "true", "yes", "on", "t", "y")
# Classes of SQLSTATE whose messages quote values: data exceptions, constraint violations, errors raised by functions.
_QUOTING = ("22", "23", "P0", "44")
_contexts: list[Callable[[], dict[str, Any]]] = []


class Logger:
    """A logger that accepts exceptions and passes on text. See `get_logger`."""

    __slots__ = ("_name", "_standard", "_structured")

    def __init__(self, name: str) -> None:
        self._name = name
        self._structured: Any = None
        self._standard = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        """Log an event at debug level."""
        self._write("debug", logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log an event at info level."""
        self._write("info", logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log an event at warning level."""
        self._write("warning", logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log an event at error level."""
        self._write("error", logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Log an event at error level, with the exception that is being handled."""
        self._write("error", logging.ERROR, event, {"exc_info": sys.exc_info()[1]} | fields)

    def _write(self, method: str, level: int, event: str, fields: dict[str, Any]) -> None:
        # Nothing that this process has not imported is configured. It takes longer to import than most of Penstock.
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            self._structured = self._structured or structlog.get_logger(self._name)
            getattr(self._structured, method)(event, **_plain(fields))
        elif self._standard.isEnabledFor(level):
            bound = structlog.contextvars.get_contextvars() if structlog is not None else {}
            self._standard.log(level, "%s", _line(event, bound | _plain(fields)), stacklevel=3)


def get_logger(name: str) -> Logger:
    """A logger for a module. Its name is "penstock" or begins with "penstock.".

    It writes a field that is an exception as `describe` returns it, and the exception `exc_info` as `traceback_of` returns it.
    """
    return Logger(name)


def payloads_shown() -> bool:
    """Whether this process logs the messages of exceptions."""
    return _payloads


def show_payloads(show: bool) -> None:
    """Set whether this process logs the messages of exceptions, which may contain payloads."""
    global _payloads
    _payloads = show


def describe(error: BaseException) -> str:
    """What a log says about an exception: its message when Penstock wrote it, otherwise its type."""
    if _payloads:
        return f"{_name(error)}: {error}"
    if isinstance(error, PenstockError) and not error.foreign:
        quoting = _sqlstate(error.__cause__)
        if not quoting.startswith(_QUOTING):
            return error.message
        return f"{_name(error)} (SQLSTATE {quoting}{_constraint(error.__cause__)})"
    if sqlstate := _sqlstate(error):
        return f"{_name(error)} (SQLSTATE {sqlstate}{_constraint(error)})"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{_name(error)}: {os.strerror(error.errno)}"
    return _name(error)


def traceback_of(error: BaseException) -> str:
    """An exception with its causes and frames as text: places in the code, without values."""
    parts: list[str] = []
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen and len(seen) < _MOST_CAUSES:
        seen.add(id(current))
        if parts:
            parts.append("Caused by:")
        parts += _frames(current)
        if isinstance(current, BaseExceptionGroup):
            for one in current.exceptions[:_MOST_CAUSES]:
                parts.append("One of the group:")
                parts += _frames(one)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n".join(parts)


def configure(log_format: str = "console", output: int = 1) -> None:
    """Configure the logs of a process that Penstock starts, at level INFO and above.

    An existing configuration of structlog and existing handlers of the root logger stay in effect.

    Args:
        log_format: "console" or "json".
        output: File descriptor to write to: 1 for workers, whose log is their output; 2 for commands with other output.
    """
    import structlog

    if not structlog.is_configured():
        last: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log_format == "console":
            # structlog's own tracebacks show local variables; handlers log through this configuration too.
            last = [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                _with_contexts,
                structlog.processors.add_log_level,
                structlog.processors.StackInfoRenderer(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                *last,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            # Processes share an output: each line is one write, so that lines of two processes do not mix.
            logger_factory=structlog.WriteLoggerFactory(file=_lines_to(output)),
            cache_logger_on_first_use=True,
        )
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(Formatter("%(asctime)s [%(levelname)s] %(name)s: %(message)s"))
        root.addHandler(handler)
    hook_in()


def add_context(fields: Callable[[], dict[str, Any]]) -> None:
    """Add fields to each line of processes that `configure` has configured, such as those of the job that runs."""
    _contexts.append(fields)


def hook_in() -> None:
    """Write uncaught exceptions of this process and its threads without values."""
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def guarded(target: Callable[..., None], *arguments: Any) -> None:
    """Run the function of a child process. An exception is written without values and ends the process with exit code 1.

    `multiprocessing` by itself would write the exception's message.
    """
    hook_in()
    try:
        target(*arguments)
    except Exception as error:
        _write(error)
        sys.exit(1)


class Formatter(logging.Formatter):
    """Formats records of the standard library's loggers (uvicorn, asyncio, aiohttp) without the values of their exceptions."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - as the library has it
        """The time with its zone, as structlog writes it."""
        return f"{datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None).isoformat()}Z"

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is the library's
        """See `logging.Formatter`."""
        return "" if ei[1] is None else traceback_of(ei[1])

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        given = record.args if isinstance(record.args, tuple) else ()
        args = tuple(describe(one) if isinstance(one, BaseException) else one for one in given) or record.args
        shown = logging.makeLogRecord({**record.__dict__, "args": args, "exc_text": None})
        if not _payloads and "\n" in (message := shown.getMessage()):
            # asyncio and uvicorn append a task with its exception, or a traceback, below the first line.
            shown.msg, shown.args = message.partition("\n")[0], None
        return super().format(shown)


def _with_contexts(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for fields in _contexts:
        for name, value in fields().items():
            event.setdefault(name, value)
    return event


def _lines_to(descriptor: int) -> TextIO:
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="backslashreplace")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "exc_info":
            if isinstance(value, BaseException):
                shown["exception"] = traceback_of(value)
        else:
            shown[name] = describe(value) if isinstance(value, BaseException) else value
    return shown


def _line(event: str, fields: dict[str, Any]) -> str:
    """An event as a line of text, with its traceback below it."""
    trace = fields.pop("exception", None)
    shown = [f"{name}={value if _is_plain(value) else repr(value)}" for name, value in fields.items()]
    return " ".join([event, *shown]) + (f"\n{trace}" if trace else "")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and not set(value) & {" ", "=", '"', "'"} and value != ""


def _frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__, limit=-_MOST_FRAMES)
    lines = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in frames]
    described, name = describe(error), _name(error)
    return [*lines, described if described.startswith(name) else f"{name}: {described}"]


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in ("builtins", "penstock.errors") else f"{kind.__module__}.{kind.__qualname__}"


def _sqlstate(error: BaseException | None) -> str:
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else ""


def _constraint(error: BaseException | None) -> str:
    name = getattr(error, "constraint_name", None)
    return f", constraint {name}" if isinstance(name, str) else ""


def _write(error: BaseException) -> None:
    sys.stderr.write(traceback_of(error) + "\n")
    sys.stderr.flush()


def _uncaught(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    _write(error)


def _uncaught_in_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
        sys.stderr.write(f"exception in thread {given.thread.name if given.thread else '?'}\n")
        _write(given.exc_value)


def _unraisable(given: Any) -> None:
    if given.exc_value is not None:
        sys.stderr.write(f"{given.err_msg or 'exception ignored'}\n")
        _write(given.exc_value)
