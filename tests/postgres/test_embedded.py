"""The embedded server: shared, safe from kill -9, and gone with its last user. Real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import fasteners
import psutil
import psycopg
import pytest

from penstock.postgres.embedded import SERVER_VERSION, EmbeddedServer, wheel_bin_dir
from tests.postgres.embedded_processes import belonging_to, execute, postmaster
from tests.waiting import until

pytestmark = pytest.mark.embedded

USER = """
import sys
from pathlib import Path
from penstock.postgres.embedded import EmbeddedServer
print(EmbeddedServer(Path(sys.argv[1])).start(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "with space"
    yield folder
    for process in belonging_to(folder):
        with suppress(psutil.Error):
            process.kill()


def start_user(folder: Path) -> subprocess.Popen[str]:
    user = subprocess.Popen([sys.executable, "-c", USER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    assert user.stdout.readline().startswith("postgresql://")
    return user


def answers(url: str) -> bool:
    try:
        return bool(execute(url, "select 1"))
    except psycopg.Error as error:
        print(f"no answer: {error}")
        return False


def test_the_server_is_the_version_that_the_documents_name(folder: Path) -> None:
    """The wheel has servers of two versions."""
    root = Path(__file__).parents[2]
    with EmbeddedServer(folder) as server:
        [(version,)] = execute(server.url, "select current_setting('server_version_num')::integer / 10000")
    assert str(version) == SERVER_VERSION
    for document in ("docs/embedded.md", "CHANGELOG.md", "docs/benchmarks.md"):
        assert re.findall(r"(?:real|embedded) PostgreSQL (\d+)", (root / document).read_text(), re.IGNORECASE) == [SERVER_VERSION]


def test_processes_share_one_server_and_the_last_one_stops_it(folder: Path) -> None:
    first, second = start_user(folder), start_user(folder)
    pid = postmaster(folder)
    assert pid is not None
    first.communicate()
    assert answers(EmbeddedServer(folder).url)
    assert postmaster(folder) == pid
    second.kill()  # also one that is killed counts as gone
    second.wait()
    until(lambda: not psutil.pid_exists(pid), "the end of the server")


def test_data_survives_the_death_of_the_server_and_it_comes_back_by_itself(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        execute(server.url, "create table t as select 42 as n")
        pid = postmaster(folder)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: postmaster(folder) not in (None, pid) and answers(server.url), "the new server")
        assert execute(server.url, "select n from t") == [(42,)]


def test_it_comes_back_though_another_program_closed_the_folder_above(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        assert answers(server.url)
        pid = postmaster(folder)
        assert pid is not None
        folder.parent.chmod(0o700)
        os.kill(pid, signal.SIGKILL)
        until(lambda: postmaster(folder) not in (None, pid) and answers(server.url), "the new server")


def test_data_survives_the_death_of_everything(folder: Path) -> None:
    user = start_user(folder)
    url = EmbeddedServer(folder).url
    execute(url, "create table t as select 42 as n")
    user.kill()
    for process in belonging_to(folder):
        with suppress(psutil.Error):
            process.kill()
    user.wait()
    with EmbeddedServer(folder) as server:
        assert execute(server.url, "select n from t") == [(42,)]


def test_a_server_without_its_supervisor_is_adopted(folder: Path) -> None:
    user = start_user(folder)
    pid = postmaster(folder)
    for process, command in belonging_to(folder).items():
        with suppress(psutil.Error):
            if any(part.endswith("supervisor.py") for part in command):
                process.kill()
                until(lambda process=process: process.status() == psutil.STATUS_ZOMBIE, "the end of the supervisor")
    other = start_user(folder)
    assert postmaster(folder) == pid
    user.kill()
    user.wait()
    other.communicate()
    until(lambda: postmaster(folder) is None, "the end of the adopted server")


def test_stale_lock_files_that_name_another_process_are_no_obstacle() -> None:
    with tempfile.TemporaryDirectory() as top:
        with_stale_lock_files(Path(top) / "data")  # a short path: the socket is in the folder


def with_stale_lock_files(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        assert answers(server.url)
        socket_dir = server.socket_dir
    until(lambda: postmaster(folder) is None, "the end of the server")
    stale = f"{os.getpid()}\n{folder / 'postgres'}\n0\n5432\n\n\n0 0\nready\n"
    (folder / "postgres" / "postmaster.pid").write_text(stale)
    (socket_dir / ".s.PGSQL.5432.lock").write_text(stale)
    with EmbeddedServer(folder) as server:
        assert answers(server.url)
    until(lambda: postmaster(folder) is None and not belonging_to(folder), "the end of the server")


def test_a_backend_that_outlives_the_server_is_no_obstacle(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        with closing(psycopg.connect(server.url)) as busy:
            backend = psutil.Process(busy.info.backend_pid)
            # Computes without looking up, so that it does not notice that its server is gone.
            busy.pgconn.send_query(b"select count(*) from generate_series(1, 1e12::bigint)")
            pid = postmaster(folder)
            assert pid is not None
            until(lambda: backend.cpu_times().user > 0.2, "the busy backend")
            os.kill(pid, signal.SIGKILL)
            until(lambda: postmaster(folder) not in (None, pid) and answers(server.url), "the new server")
        assert not backend.is_running()


def test_two_of_one_process_share_the_server_until_the_last_stops(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    first, second = EmbeddedServer(folder), EmbeddedServer(tmp_path / "link" / folder.name)
    url = first.start()
    assert second.start() == url
    pid = postmaster(folder)
    first.stop()
    first.stop()
    # Only the supervisor that is about to stop the server could lock exclusively.
    other = start_user(folder)
    other.communicate()
    assert postmaster(folder) == pid
    assert answers(url)
    second.stop()
    until(lambda: postmaster(folder) is None, "the end of the server")


def test_many_that_start_at_once_get_one_server(folder: Path) -> None:
    users = [
        subprocess.Popen([sys.executable, "-c", USER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    lines = {user.stdout.readline() for user in users if user.stdout}
    assert len(lines) == 1

    def servers() -> int:
        return sum(Path(command[0]).name == "postgres" and "-D" in command for command in belonging_to(folder).values())

    # A process that the server has just started has its command line for a moment.
    until(lambda: servers() == 1, "one server")
    for user in users:
        user.communicate()


def test_a_half_made_folder_is_made_again_and_a_long_path_works(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    (folder / "postgres.new").mkdir(parents=True)
    (folder / "postgres.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedServer(folder) as server:
        assert answers(server.url)
    until(lambda: postmaster(folder) is None, "the end of the server")


def slow_programs(folder: Path, hold: Path) -> Path:
    """PostgreSQL's programs, of which the server starts only when the file `hold` is gone."""
    folder.mkdir()
    for program in wheel_bin_dir().iterdir():
        (folder / program.name).symlink_to(program)
    (folder / "postgres").unlink()
    (folder / "postgres").write_text(
        f"#!/bin/sh\nwhile [ -e '{hold}' ]; do sleep 0.05; done\nexec '{wheel_bin_dir() / 'postgres'}' \"$@\"\n"
    )
    (folder / "postgres").chmod(0o755)
    return folder


def test_it_ends_when_its_last_user_ends_while_a_crashed_server_is_started_again(folder: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    server = EmbeddedServer(folder, bin_dir=slow_programs(tmp_path / "programs", hold))
    server.start()
    pid = postmaster(folder)
    assert pid is not None
    hold.touch()
    os.kill(pid, signal.SIGKILL)
    until(lambda: any("/bin/sh" in command[0] for command in belonging_to(folder).values()), "the new start", timeout=60)
    server.stop()
    until(lambda: not belonging_to(folder), "the end of the supervisor", timeout=90)


def test_no_process_gets_the_folder_before_the_server_of_earlier_users_has_ended(folder: Path) -> None:
    server = EmbeddedServer(folder)
    with closing(psycopg.connect(server.start())) as connection:
        # The server waits for this process before it ends.
        backend = psutil.Process(connection.info.backend_pid)
        backend.suspend()
        try:
            server.stop()
            until(lambda: "fast shutdown request" in (folder / "postgres.log").read_text(), "the end of the server", timeout=60)
            users = fasteners.InterProcessReaderWriterLock(str(folder / "users.lock"))
            assert not users.acquire_read_lock(blocking=True, delay=0.05, max_delay=0.1, timeout=2)
        finally:
            backend.resume()
    until(lambda: not belonging_to(folder), "the end of the supervisor", timeout=60)
    with server:
        assert answers(server.url)


def test_it_runs_as_an_ordinary_user() -> None:
    """CI runs as root, most users do not. When the interpreter is out of reach of other users the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("all the other tests run as an ordinary user")
    with tempfile.TemporaryDirectory() as home:
        shutil.chown(home, "nobody")
        script = "import sys, pathlib; from penstock.postgres.embedded import EmbeddedServer as E; "
        script += "s = E(pathlib.Path('data')); print(s.start(), flush=True); import psycopg; "
        script += "print(psycopg.connect(s.url).execute('select 6 * 7').fetchone()[0])"
        environment = {"HOME": home, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
        python = next((p for p in (sys.executable, "/usr/bin/python3") if imports_as_another_user(p, environment)), None)
        if python is None:
            pytest.skip("the user nobody can reach no interpreter")
        done = subprocess.run(
            [python, "-c", script], user="nobody", group="nogroup", extra_groups=[], cwd=home, env=environment,
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.stdout.split()[-1:] == ["42"], done.stderr
        until(lambda: not belonging_to(Path(home)), "the end of the server")


def imports_as_another_user(python: str, environment: dict[str, str]) -> bool:
    try:
        done = subprocess.run([python, "-c", "import penstock, psycopg"], user="nobody", env=environment, cwd="/", check=False)
    except OSError:
        return False
    return done.returncode == 0
