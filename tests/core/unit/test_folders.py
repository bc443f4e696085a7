"""Folders are checked without following links, and changed only when they are ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.core import folders

ME = os.geteuid()
as_root = pytest.mark.skipif(ME != 0, reason="only root can give away a folder")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_is_no_folder_of_the_owner_is_refused(tmp_path: Path) -> None:
    mine, file, link = tmp_path / "mine", tmp_path / "file", tmp_path / "link"
    mine.mkdir(mode=0o700)
    file.touch()
    link.symlink_to(mine)
    os.close(folders.open_checked(mine, {ME}))
    folders.check(mine, {ME})
    for path, owners, wrong in [
        (link, {ME}, "is a link"), (file, {ME}, "is not a folder"), (mine, {ME + 7}, "belongs to the user"),
    ]:  # fmt: skip
        for look in (folders.open_checked, folders.check):
            with pytest.raises(folders.UnsafeFolder, match=wrong):
                look(path, owners)
    mine.chmod(0o750)
    with pytest.raises(folders.UnsafeFolder, match="open to others"):
        folders.open_checked(mine, {ME})
    with pytest.raises(FileNotFoundError):
        folders.check(tmp_path / "none", {ME})


def test_a_folder_of_ones_own_is_made_private_and_closed_to_writers(tmp_path: Path) -> None:
    folders.make_own(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700
    (tmp_path / "a" / "b").chmod(0o775)
    folders.make_own(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o755
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(folders.UnsafeFolder, match="is a link"):
        folders.make_own(tmp_path / "link")


@as_root
def test_a_link_of_another_user_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    folders.refuse_foreign_links(tmp_path / "link" / "x", {ME})
    os.chown(tmp_path / "link", 1, 1, follow_symlinks=False)
    with pytest.raises(folders.UnsafeFolder, match="is a link of the user"):
        folders.refuse_foreign_links(tmp_path / "link" / "x", {ME})


def test_only_ones_own_folders_are_opened_to_those_who_pass(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b" / "c"
    inner.mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    folders.let_through(inner / "file")
    assert mode(tmp_path / "a") == 0o701
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(folders.UnsafeFolder, match="cannot pass through"):
        folders.let_through(tmp_path / "link" / "b" / "file")
    (tmp_path / "a").chmod(0o710)
    folders.let_through(inner / "file", (tmp_path / "a").stat().st_gid)
    assert mode(tmp_path / "a") == 0o710
    if ME == 0:
        os.chown(tmp_path / "a", 1, 1)
        with pytest.raises(folders.UnsafeFolder, match="is closed to others"):
            folders.let_through(inner / "file")
        assert mode(tmp_path / "a") == 0o710


def test_a_file_is_replaced_not_written_through_a_link(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("kept")
    (tmp_path / "rules").symlink_to(foreign)
    (tmp_path / f"rules.{os.getpid()}.new").symlink_to(foreign)
    folder = os.open(tmp_path, os.O_RDONLY)
    folders.replace_file(folder, "rules", "new", 0o640)
    os.close(folder)
    assert (foreign.read_text(), (tmp_path / "rules").read_text(), mode(tmp_path / "rules")) == ("kept", "new", 0o640)


def test_a_random_folder_is_private_and_its_path_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 25)))
    first, second = folders.random_folder("penstock-", 80), folders.random_folder("penstock-", 80)
    try:
        assert first != second
        assert mode(first) == 0o700
        assert len(str(first)) <= 80
    finally:
        first.rmdir()
        second.rmdir()
    with pytest.raises(folders.UnsafeFolder, match="no temporary folder"):
        folders.random_folder("penstock-", 5)
