"""Access to the embedded server: only the user who owns its folder can connect, and no other user of the machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from penstock.errors import EmbeddedServerError
from penstock.postgres import embedded
from penstock.postgres.embedded import EmbeddedServer, wheel_bin_dir
from penstock.testing import memory_folder
from tests.postgres.embedded_processes import belonging_to, execute, postmaster
from tests.waiting import until

pytestmark = pytest.mark.embedded
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
DAEMON, NOBODY = 1, 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A data folder that others can reach."""
    with tempfile.TemporaryDirectory(prefix="penstock-access-", dir=memory_folder()) as top:
        Path(top).chmod(0o755)
        folder = Path(top) / "data"
        yield folder
        for process in belonging_to(folder):
            with suppress(psutil.Error):
                process.kill()


def psql_as(user: int, socket_dir: Path, *, group: int | None = None, role: str = "penstock") -> subprocess.CompletedProcess[str]:
    command = [wheel_bin_dir() / "psql", "-Xtc", "select current_user", "-h", socket_dir, "-U", role, "-d", "penstock"]
    return run_as(user, user if group is None else group, *command)


def run_as(user: int, group: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, user=user, group=group, extra_groups=[], cwd="/", capture_output=True, text=True, check=False
    )  # fmt: skip


def stopped(folder: Path) -> None:
    until(lambda: postmaster(folder) is None and not belonging_to(folder), "the end of the server")


@as_root
def test_another_user_cannot_connect_even_where_the_folder_is_open(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        socket_dir = server.socket_dir
        execute(server.url, "create role shop login")
        assert psql_as(0, socket_dir, role="shop").stdout.strip() == "shop"
        for user in (DAEMON, NOBODY):
            assert psql_as(user, socket_dir).returncode != 0
        assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
        socket_dir.chmod(0o755)
        (socket_dir / ".s.PGSQL.5432").chmod(0o777)
        for user in (DAEMON, NOBODY):
            for role in ("penstock", "shop", "postgres"):
                assert "Peer authentication failed" in psql_as(user, socket_dir, role=role).stderr
        # An open folder is seen at the next use.
        with pytest.raises(EmbeddedServerError, match="open to others"):
            server.url  # noqa: B018
        socket_dir.chmod(0o700)
        assert execute(server.url, "show listen_addresses") == [("",)]
        assert not [line for line in (folder / "postgres" / "pg_hba.conf").read_text().splitlines() if "trust" in line]


@as_root
def test_a_folder_with_trust_is_upgraded_at_its_start(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        execute(server.url, "create table t as select 42 as n")
    stopped(folder)
    rules = folder / "postgres" / "pg_hba.conf"
    rules.write_text("local all all trust\nhost all all 127.0.0.1/32 trust\n")
    (folder / "postgres" / "pg_ident.conf").write_text("")
    folder.chmod(0o777)  # as a careless umask makes it
    with EmbeddedServer(folder) as server:
        assert execute(server.url, "select n from t") == [(42,)]
        assert execute(server.url, "select distinct type, auth_method from pg_hba_file_rules") == [("local", "peer")]
        assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0


def test_the_folder_of_a_long_path_cannot_be_guessed_or_made_before(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    guessed = Path(tempfile.gettempdir()) / f"penstock-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    guessed.mkdir(mode=0o777)
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o750)
    link = tmp_path / "link"
    link.symlink_to(foreign)
    if os.geteuid() == 0:
        os.chown(guessed, DAEMON, DAEMON)
        os.chown(foreign, DAEMON, DAEMON)
    before = [(path.stat().st_uid, path.stat().st_mode) for path in (guessed, foreign)]
    try:
        with pytest.raises(EmbeddedServerError, match="no server runs"):
            EmbeddedServer(folder).url  # noqa: B018
        with EmbeddedServer(folder) as server:
            first = server.socket_dir
            assert first != guessed
            assert stat.S_IMODE(first.lstat().st_mode) == 0o700
            assert execute(server.url, "select 1") == [(1,)]
        stopped(folder)
        assert not first.exists()
        # Another user takes the old name, with a folder of its own or a link.
        (folder / "socket-folder").write_text(f"{link}\n")
        with EmbeddedServer(folder) as server:
            assert server.socket_dir not in (first, link, guessed)
            assert execute(server.url, "select 1") == [(1,)]
            (folder / "socket-folder").write_text(f"{link}\n")
            with pytest.raises(EmbeddedServerError, match="is a link"):
                server.url  # noqa: B018
        stopped(folder)
        assert [(path.stat().st_uid, path.stat().st_mode) for path in (guessed, foreign)] == before
        assert not list(foreign.iterdir())
    finally:
        shutil.rmtree(guessed)


@as_root
@pytest.mark.parametrize("planted", ["data", "socket", "postgres.new", "foreign data"])
def test_planted_links_and_folders_are_refused_and_what_they_lead_to_stays(folder: Path, planted: str) -> None:
    foreign = folder.parent / "foreign"
    foreign.mkdir(mode=0o750)
    (foreign / "kept").touch()
    os.chown(foreign, DAEMON, DAEMON)
    if planted == "data":
        folder.symlink_to(foreign)
        os.chown(folder, DAEMON, DAEMON, follow_symlinks=False)
    elif planted == "foreign data":
        folder.mkdir(mode=0o777)
        os.chown(folder, DAEMON, DAEMON)
    else:
        folder.mkdir()
        (folder / planted).symlink_to(foreign)
    with pytest.raises(EmbeddedServerError, match="is a link|belongs to the user daemon|could not be started") as refused:
        EmbeddedServer(folder).start()
    print(refused.value.hint)
    assert (foreign.stat().st_uid, stat.S_IMODE(foreign.stat().st_mode)) == (DAEMON, 0o750)
    assert [path.name for path in foreign.iterdir()] == ["kept"]


@as_root
def test_another_user_can_read_no_log_and_hold_no_lock(folder: Path) -> None:
    with EmbeddedServer(folder):
        pass
    stopped(folder)
    for name in ("postgres.log", "users.lock", "supervisor.lock"):
        (folder / name).chmod(0o644)  # as older versions made them
    with EmbeddedServer(folder):
        for name in ("postgres.log", "supervisor.log", "users.lock", "supervisor.lock"):
            assert run_as(NOBODY, NOBODY, "cat", folder / name).returncode != 0, name
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


@as_root
def test_a_closed_folder_of_another_user_is_not_opened(folder: Path) -> None:
    folder.parent.chmod(0o700)
    os.chown(folder.parent, DAEMON, DAEMON)
    with pytest.raises(EmbeddedServerError) as refused:
        EmbeddedServer(folder).start()
    assert "user daemon is closed to others" in (refused.value.hint or "")
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@as_root
def test_without_a_user_of_its_own_the_server_is_told_from_others_by_a_group(folder: Path) -> None:
    """There may be no user postgres: then the server runs as nobody, as other programs do."""
    server = EmbeddedServer(folder)
    os.umask(0o022)
    program = "import runpy, sys; k = runpy.run_path(sys.argv[1]); "
    program += "k['ServerFiles'].prepare.__globals__['ACCOUNTS'] = ('nobody',); from pathlib import Path; "
    program += "sys.exit(k['Supervisor'](Path(sys.argv[2]), Path(sys.argv[3])).run())"
    command = [sys.executable, "-c", program, str(embedded.SUPERVISOR), str(folder), str(wheel_bin_dir())]
    server.spawn_supervisor = lambda: subprocess.Popen(command, cwd=folder, start_new_session=True)  # type: ignore[method-assign]
    with server:
        assert execute(server.url, "select 1") == [(1,)]
        pid = postmaster(folder)
        assert pid is not None
        running = psutil.Process(pid)
        assert (running.uids().real, running.gids().real) == (NOBODY, folder.stat().st_gid)
        for group in (NOBODY, 65533):
            refused = psql_as(NOBODY, server.socket_dir, group=group)
            assert "Permission denied" in refused.stderr
            assert run_as(NOBODY, group, "cat", folder / "postgres" / "PG_VERSION").returncode != 0
        # Nor can such a program take the place of the server's socket.
        assert server.socket_dir.stat().st_uid == 0
    stopped(folder)


def test_the_supervisor_is_isolated_from_the_environment_and_from_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    for place in (folder, tmp_path):
        for module in ("sitecustomize", "fasteners", "psutil", "http", "json"):
            (place / f"{module}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with EmbeddedServer(folder) as server:
        assert execute(server.url, "select 1") == [(1,)]
        commands = belonging_to(folder).values()
        supervisors = [command for command in commands if any(part.endswith("supervisor.py") for part in command)]
        assert supervisors and all("-I" in command for command in supervisors)
    assert not (tmp_path / "imported").exists()
    stopped(folder)


def test_the_tables_of_an_application_come_first_in_public(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        execute(server.url, "create schema if not exists penstock")
        execute(server.url, "create table jobs (id int)")
        assert execute(server.url, "select schemaname from pg_tables where tablename = 'jobs'") == [("public",)]
        execute(server.url, "alter role penstock reset search_path")  # as in a folder that an older version made
    stopped(folder)
    with EmbeddedServer(folder) as server:
        assert execute(server.url, "show search_path") == [("public",)]
        execute(server.url, "alter database penstock set search_path = shop, public")
        execute(server.url, "alter role penstock reset search_path")
    stopped(folder)
    with EmbeddedServer(folder) as server:  # a search path that was set stays
        assert execute(server.url, "show search_path") == [("shop, public",)]


def test_what_is_told_about_a_server_that_does_not_run(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "none")
    assert not server.running
    with pytest.raises(EmbeddedServerError, match="no server runs in"):
        server.url  # noqa: B018
