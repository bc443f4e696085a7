"""Logs of an error: its type and its place in the code, never its message or local values; and where logs go."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
import structlog

import penstock
from penstock import Fail, InvalidInput, Retry
from penstock.core import logs
from penstock.postgres.translation import translate

WARN = """
log = get_logger("penstock.test")
log.debug("begun", a=1)
structlog.contextvars.bind_contextvars(request="r1")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed", error=ValueError("hidden"), about="two words", rest=3, exception_of=KeyError())
"""
SECRET = "s3cret-of-the-payload"
SOURCES = Path(penstock.__file__).parent


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    held = {"password": SECRET}
    try:
        raise error from cause
    except BaseException as caught:
        assert held
        return caught


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that uses the package as a library."""
    program = f"import structlog\nfrom penstock.core.logs import get_logger\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


def of_server(sqlstate: str, message: str) -> Exception:
    kind = asyncpg.PostgresError.get_message_class_for_sqlstate(sqlstate)
    error = kind(message)
    error.sqlstate, error.message = sqlstate, message
    translated = translate(error)
    assert translated is not None
    return raised(translated, error)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "error",
    [
        raised(ValueError(SECRET)),
        raised(KeyError(SECRET), ValueError(SECRET)),
        raised(Fail(SECRET)),
        raised(Retry(SECRET)),
        raised(RuntimeError("a wrong password"), Fail(SECRET)),
        ExceptionGroup("several", [raised(ValueError(SECRET))]),  # type: ignore[list-item]
        of_server("22P02", f'invalid input syntax for type uuid: "{SECRET}"'),
        of_server("23505", f"Key (id)=({SECRET}) already exists"),
        of_server("P0001", SECRET),
    ],
    ids=lambda error: type(error).__name__,
)
def test_neither_messages_nor_values_are_logged(error: BaseException) -> None:
    assert SECRET not in logs.describe(error)
    text = logs.traceback_of(error)
    assert SECRET not in text
    assert type(error).__name__ in text
    assert "in raised" in text or isinstance(error, ExceptionGroup)


def test_what_penstock_says_is_logged() -> None:
    assert logs.describe(InvalidInput("job type a b is not valid")) == "job type a b is not valid"
    assert "PS404" not in logs.describe(of_server("PS404", "no job type nosuch")) == "no job type nosuch"
    assert "password authentication failed" in logs.describe(of_server("28P01", "password authentication failed"))
    assert logs.describe(ConnectionRefusedError(111, SECRET)) == "ConnectionRefusedError: Connection refused"


def test_the_operator_can_ask_for_messages() -> None:
    logs.show_payloads(True)
    try:
        assert SECRET in logs.describe(ValueError(SECRET))
    finally:
        logs.show_payloads(False)


def test_no_configuration_of_structlog_shows_locals(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    log = logs.get_logger("penstock.test")
    for processors in (None, [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]):
        structlog.reset_defaults()
        if processors is not None:
            structlog.configure(processors=processors)
        try:
            try:
                password = SECRET
                raise ValueError(password)
            except ValueError as error:
                log.exception("failed", request_id="r1")
                log.warning("failed_again", error=error)
        finally:
            structlog.reset_defaults()
        written = "".join(capsys.readouterr()) + caplog.text
        caplog.clear()
        assert "r1" in written and "ValueError" in written
        assert SECRET not in written


def test_an_application_that_configured_nothing_gets_warnings_on_standard_error() -> None:
    written = run(WARN)
    assert written.stdout == ""
    first, *trace = written.stderr.splitlines()
    assert first == "failed request=r1 error=ValueError about='two words' rest=3 exception_of=KeyError"
    assert trace[-1] == "ZeroDivisionError" and len(trace) == 2, trace


def test_an_application_decides_with_the_standard_library_what_it_logs() -> None:
    everything = run("import logging; logging.basicConfig(level=logging.DEBUG)" + WARN)
    assert "DEBUG:penstock.test:begun a=1" in everything.stderr
    nothing = run("import logging; logging.getLogger('penstock').setLevel(logging.CRITICAL)" + WARN)
    assert nothing.stdout + nothing.stderr == ""


def test_a_configuration_of_structlog_gets_the_fields() -> None:
    written = run("structlog.configure(processors=[structlog.processors.JSONRenderer()])" + WARN)
    assert '{"a": 1, "event": "begun"}' in written.stdout
    assert written.stderr == ""


def test_loggers_of_the_standard_library_show_no_messages() -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logs.Formatter("%(name)s %(message)s"))
    for name in ("asyncio", "uvicorn.error"):
        logger = logging.getLogger(f"{name}")
        logger.addHandler(handler)
        try:
            error = raised(ValueError(SECRET))
            logger.error(f"Task exception was never retrieved\nfuture: {error!r}", exc_info=error)
            logger.error("it failed: %s", error)
        finally:
            logger.removeHandler(handler)
    assert output.getvalue().count("ValueError") == 4
    assert SECRET not in output.getvalue()


def test_every_module_logs_through_one_place() -> None:
    wrong = [
        f"{path.relative_to(SOURCES)}: {found}"
        for path in SOURCES.rglob("*.py")
        if path.name != "logs.py"
        for found in re.findall(
            r"structlog\.(?:get_logger|configure)|logging\.(?:basicConfig|getLogger\(__name__\))|print_exc|"
            r"log\.\w+\([^\n]*(?:error=str\(|error=\w+\.message|exc_info=True)",
            path.read_text(),
        )
    ]
    assert wrong == []
