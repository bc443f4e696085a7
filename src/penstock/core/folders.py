"""Folders that no other user can have prepared: checked without following links, changed only through the checked descriptor.

A user who may write into a parent folder can put a link, or a folder of their own, where Penstock expects its own. A check by
path followed by a change by path is a race that this user can win. Penstock therefore opens a folder without following a link,
checks it through that descriptor, and changes it through the same descriptor. This module imports nothing of Penstock, because
the supervisor of the embedded server, which is to be small, imports it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

POSIX = os.name == "posix"
_OPEN = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_WRITABLE_BY_OTHERS = 0o022


class UnsafeFolder(Exception):
    """A folder belongs to another user, is a link, or is open to others."""


def open_checked(path: Path, owners: Collection[int], forbidden: int = 0o077) -> int:
    """Open a folder that is not a link, belongs to one of `owners`, and has none of the `forbidden` rights.

    Returns its descriptor.

    Raises:
        UnsafeFolder: The folder does not satisfy a condition; the message says which.
        FileNotFoundError: The folder does not exist.
    """
    try:
        folder = os.open(path, _OPEN)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsafeFolder(_why(path, owners, forbidden) or f"the folder {path} cannot be opened: {error.strerror}") from None
    if wrong := _wrong(path, os.fstat(folder), owners, forbidden):
        os.close(folder)
        raise UnsafeFolder(wrong)
    return folder


def check(path: Path, owners: Collection[int], forbidden: int = 0o077) -> None:
    """Raise `UnsafeFolder` or `FileNotFoundError` as `open_checked` does, by lstat alone."""
    if wrong := _wrong(path, path.lstat(), owners, forbidden):
        raise UnsafeFolder(wrong)


def refuse_foreign_links(path: Path, owners: Collection[int]) -> None:
    """Raise `UnsafeFolder` when a link on the way to `path` belongs to a user who is not one of `owners`."""
    place = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        place /= part
        try:
            found = place.lstat()
        except OSError:
            return  # missing or not accessible: opening the folder reports it
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in owners:
            raise UnsafeFolder(f"{place} is a link of the user {name_of(found.st_uid)}, who can point it anywhere")


def make_own(path: Path, mode: int = 0o700) -> None:
    """Make a folder of this user's own, with its parents, unless it exists.

    An existing folder keeps its mode, less the right of others to write.

    Raises:
        UnsafeFolder: The folder, or a link that leads to it, belongs to another user.
        OSError: The folder cannot be made.
    """
    if not POSIX:
        path.mkdir(parents=True, exist_ok=True)
        return
    me = os.geteuid()
    refuse_foreign_links(path, (me, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=mode)
    folder = open_checked(path, (me,), 0)
    try:
        found = stat.S_IMODE(os.fstat(folder).st_mode)
        if found & _WRITABLE_BY_OTHERS:
            os.fchmod(folder, found & ~_WRITABLE_BY_OTHERS)
    finally:
        os.close(folder)


def guarded(path: Path) -> bool:
    """Whether no other user can replace `path` or one of its parents with another folder."""
    if not POSIX:
        return True
    trusted = (os.geteuid(), 0)
    for place in (path, *path.parents):
        found = place.lstat()
        others = found.st_mode & _WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in trusted or others or stat.S_ISLNK(found.st_mode):
            return False
    return True


def random_folder(prefix: str, longest: int) -> Path:
    """Make a temporary folder of mode 0700 with a random name, whose path has at most `longest` bytes."""
    last: OSError | None = None
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):  # noqa: S108 - the folder's name is random
        if len(os.fsencode(parent)) + 1 + len(prefix) + 8 > longest:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            last = error
    raise UnsafeFolder(f"there is no temporary folder for a path of {longest} bytes{f': {last.strerror}' if last else ''}")


def let_through(path: Path, group: int | None = None) -> None:
    """Let other users pass through the parents of `path`: the right to enter, not to list. Only folders of this user change.

    A folder that members of `group` can enter stays as it is.

    Raises:
        UnsafeFolder: A folder of another user is closed, or a link is in the way.
    """
    me = os.geteuid()
    place = Path(path.anchor)
    folder = os.open(place, _OPEN)
    try:
        for part in path.parent.parts[1:]:
            place /= part
            try:
                inner = os.open(part, _OPEN, dir_fd=folder)
            except OSError as error:
                raise UnsafeFolder(f"cannot pass through {place}: {error.strerror}") from None
            os.close(folder)
            folder = inner
            found = os.fstat(folder)
            if found.st_mode & 0o001 or (found.st_mode & 0o010 and found.st_gid == group):
                continue
            if found.st_uid != me:
                raise UnsafeFolder(
                    f"the folder {place} of the user {name_of(found.st_uid)} is closed to others: let its owner run chmod o+x, "
                    "run as that user, or choose another place"
                )
            os.fchmod(folder, stat.S_IMODE(found.st_mode) | 0o001)
    finally:
        os.close(folder)


def replace_file(folder: int, name: str, text: str, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Write a file in an opened folder. It is written under a temporary name and renamed, so that no link is followed."""
    fresh = f"{name}.{os.getpid()}.new"
    with suppress(FileNotFoundError):
        os.unlink(fresh, dir_fd=folder)
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode, dir_fd=folder)
    with os.fdopen(file, "w", encoding="utf-8") as out:
        if owner is not None:
            os.fchown(file, *owner)
        os.fchmod(file, mode)
        out.write(text)
    os.replace(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)


def close_file(path: Path) -> None:
    """Make a file if there is none, and close it to others: a user who can read it could lock it and block its other users.

    The folder must be this user's own. An existing file is not opened, since closing it would end this process's locks on it.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))
    except FileExistsError:
        if POSIX:
            path.chmod(0o600)


def name_of(uid: int) -> str:
    """The name of a user, or the number when the user has no name."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _why(path: Path, owners: Collection[int], forbidden: int) -> str:
    try:
        return _wrong(path, path.lstat(), owners, forbidden)
    except OSError:
        return ""


def _wrong(path: Path, found: os.stat_result, owners: Collection[int], forbidden: int) -> str:
    """What is wrong with a folder; empty when it is as it should be."""
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link, not a folder"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid not in owners:
        expected = " or ".join(name_of(owner) for owner in owners)
        return f"the folder {path} belongs to the user {name_of(found.st_uid)}, not to {expected}"
    if open_to := stat.S_IMODE(found.st_mode) & forbidden:
        return f"the folder {path} is open to others (mode {stat.S_IMODE(found.st_mode):o}, {open_to:o} too much)"
    return ""
