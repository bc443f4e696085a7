"""The files of an embedded server: who owns them, where its socket is, and who may connect.

Each start writes the rules of who may connect: only the operating system's user who owns the data folder, as any role. PostgreSQL
refuses to run as root, so for root it runs as another user, who gets two folders: that of the data and that of the socket. Root
changes these only through descriptors of folders that it has created or checked.

This module imports nothing of Penstock but `core/folders.py`, see `supervisor.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.core import folders

USER = "penstock"
SOCKET_RECORD = "socket-folder"
LONGEST_SOCKET_FOLDER = 80
"""In bytes: the path of a socket has at most 107, of which the name of PostgreSQL's takes 14."""
ACCOUNTS = ("postgres", "pgserver", "nobody")
"""The users as whom PostgreSQL runs for root: the first one that exists, unless the data already belong to another user."""
SHARED_ACCOUNTS = ("nobody",)
"""Those of `ACCOUNTS` as whom other programs run too."""
PRIVATE_GROUPS = range(50_000, 60_000)
"""Group ids above those that systems give to people, and within those that an unprivileged container has."""
RULES_HEAD = "# Written by Penstock at each start of the server. What you add here is lost."


class ServerFiles:
    """The folders of one server.

    Args:
        folder: The folder that Penstock was given, which holds those of PostgreSQL.
        bin_dir: Folder of PostgreSQL's programs.

    Attributes:
        data: Folder of PostgreSQL's data.
        socket_dir: Folder of its socket; `prepare` says where it is.
        identity: As whom a process of the server runs, for `subprocess`; empty: as this user.
    """

    def __init__(self, folder: Path, bin_dir: Path) -> None:
        self.folder = folder
        self.data = folder / "postgres"
        self.socket_dir = folder / "socket"
        self.identity: dict[str, Any] = {}
        self._bin_dir = bin_dir
        self._account: tuple[int, int] | None = None

    def prepare(self) -> None:
        """Create what is missing, and check what is there. Raises `UnsafeFolder`, and `SystemExit` with the reason."""
        self._choose_account()
        self._prepare_socket_folder()
        self.open_parent_folders()
        version = self.data / "PG_VERSION"
        if version.exists():
            ours = (
                subprocess.run(  # noqa: S603
                    [self._bin_dir / "postgres", "--version"], check=True, capture_output=True, text=True
                )
                .stdout.split()[2]
                .split(".")[0]
            )
            if version.read_text().strip() != ours:
                raise SystemExit(
                    f"the data in {self.data} is of PostgreSQL {version.read_text().strip()}, this is {ours}: "
                    "move it with pg_dump, or choose another folder with PENSTOCK_DATA_DIR"
                )
            return
        # Created under another name and renamed, so that an incomplete data folder never looks complete.
        fresh = self.folder / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        self._give(fresh)
        subprocess.run(  # noqa: S603
            [
                str(self._bin_dir / "initdb"), "--pgdata", str(fresh), "--username", USER, "--auth", "peer",
                "--auth-host", "reject", "--encoding", "UTF8", "--locale", "C", "--no-instructions",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=fresh,
            **self.identity,
        )  # fmt: skip
        fresh.rename(self.data)

    def open_parent_folders(self) -> None:
        """Let the server's user reach its files. Each start does so, since the parent folders may have been closed meanwhile."""
        if self._account is None:
            return
        for path in (self.data, self.socket_dir, (self._bin_dir / "postgres").resolve()):
            folders.let_through(path, self._account[1])

    def write_access_rules(self) -> None:
        """Write PostgreSQL's access rules: it asks the operating system who connects, and admits only our user, as any role."""
        if not folders.POSIX:
            return
        version = int((self.data / "PG_VERSION").read_text())
        # Before 16 a map cannot name all roles: the others log in with their passwords.
        every = "all" if version >= 16 else USER
        rules = [RULES_HEAD, f"local all {every} peer map=penstock", f"local replication {every} peer map=penstock"]
        if version < 16:
            rules.append("local all all scram-sha-256")
        user = folders.name_of(os.geteuid()).replace('"', '""')
        folder = folders.open_checked(self.data, self._owners(), 0o077)
        try:
            for name, lines in {"pg_hba.conf": rules, "pg_ident.conf": [RULES_HEAD, f'penstock "{user}" {every}']}.items():
                folders.replace_file(folder, name, "\n".join(lines) + "\n", 0o600, self._account)
        finally:
            os.close(folder)

    def remove_lock_files(self) -> None:
        """Remove the lock files of a server that has ended with all of its processes."""
        for place in (self.data, self.socket_dir):
            folder = folders.open_checked(place, self._owners(), self._forbidden())
            try:
                for name in os.listdir(folder):  # noqa: PTH208 - a descriptor
                    if name == "postmaster.pid" or name.startswith(".s.PGSQL."):
                        os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

    def uses_socket_dir(self) -> bool:
        """Whether the running server has its socket in our folder; a server of an older version may have it elsewhere."""
        try:
            return Path((self.data / "postmaster.pid").read_text().splitlines()[4]) == self.socket_dir
        except (OSError, IndexError):
            return False

    def leave_socket_folder(self) -> None:
        """Remove the folder of the socket outside the data folder. (After a crash it remains and is used again.)"""
        if self.socket_dir.parent == self.folder:
            return
        with contextlib.suppress(OSError, folders.UnsafeFolder):
            folders.check(self.socket_dir, self._owners(), self._forbidden())
            self.socket_dir.rmdir()
            (self.folder / SOCKET_RECORD).unlink()

    def _choose_account(self) -> None:
        """Choose the user as whom the server runs, and the group that may enter its folder."""
        if not folders.POSIX or os.geteuid() != 0:
            return
        folder = folders.open_checked(self.folder, {0}, 0o022)
        try:
            uid, gid = self._find_account()
            found = os.fstat(folder)
            if folders.name_of(uid) in SHARED_ACCOUNTS:
                # Other programs run as this user too. A group that no other program has distinguishes the server from them.
                gid = found.st_gid if self._is_private(found.st_gid) else _unused_group()
                os.fchown(folder, 0, gid)
                os.fchmod(folder, 0o710)
        finally:
            os.close(folder)
        self._account = (uid, gid)
        self.identity = {"user": uid, "group": gid, "extra_groups": []}

    def _find_account(self) -> tuple[int, int]:
        import pwd

        try:
            uid = self.data.lstat().st_uid
            return uid, pwd.getpwuid(uid).pw_gid
        except (FileNotFoundError, KeyError):
            pass
        for name in ACCOUNTS:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return entry.pw_uid, entry.pw_gid
        raise SystemExit("PostgreSQL does not run as root and there is no user postgres or nobody: start as an ordinary user")

    def _is_private(self, gid: int) -> bool:
        return gid in PRIVATE_GROUPS and not _known_group(gid)

    def _give(self, path: Path) -> None:
        """Make the server's user the owner of a new folder."""
        if self._account is None:
            return
        folder = folders.open_checked(path, {0})
        try:
            os.fchown(folder, *self._account)
        finally:
            os.close(folder)

    def _prepare_socket_folder(self) -> None:
        """Create or check the folder of the socket: in the data folder, or with a random name that a file there records."""
        if len(os.fsencode(self.socket_dir)) <= LONGEST_SOCKET_FOLDER:
            with contextlib.suppress(FileExistsError):
                self.socket_dir.mkdir(mode=0o700)
                self._own_socket_folder()
            folders.check(self.socket_dir, self._owners(), self._forbidden())
            return
        record = self.folder / SOCKET_RECORD
        try:
            self.socket_dir = Path(record.read_text("utf-8").rstrip("\n"))
            folders.check(self.socket_dir, self._owners(), self._forbidden())
        except (OSError, folders.UnsafeFolder) as error:
            if not isinstance(error, FileNotFoundError):
                print(f"another folder for the socket: {error}", file=sys.stderr)
            self.socket_dir = folders.random_folder("penstock-", LONGEST_SOCKET_FOLDER)
            self._own_socket_folder()
            folder = folders.open_checked(self.folder, {os.geteuid()}, 0o022)
            try:
                folders.replace_file(folder, SOCKET_RECORD, f"{self.socket_dir}\n")
            finally:
                os.close(folder)

    def _own_socket_folder(self) -> None:
        if self._account is None or not self._is_private(self._account[1]):
            self._give(self.socket_dir)
            return
        # The server has access through its group. The folder stays root's, since another program of that user could replace the
        # socket.
        folder = folders.open_checked(self.socket_dir, {0})
        try:
            os.fchown(folder, 0, self._account[1])
            os.fchmod(folder, 0o770)
        finally:
            os.close(folder)

    def _owners(self) -> set[int]:
        return {os.geteuid(), self._account[0]} if self._account else {os.geteuid()} if folders.POSIX else set()

    def _forbidden(self) -> int:
        """The permissions that the server's folders must not grant. The group may have access when only the server has it."""
        return 0o007 if self._account is not None and self._is_private(self._account[1]) else 0o077


def _known_group(gid: int) -> bool:
    import grp

    try:
        grp.getgrgid(gid)
    except KeyError:
        return False
    return True


def _unused_group() -> int:
    while _known_group(gid := secrets.choice(PRIVATE_GROUPS)):
        pass
    return gid
