"""Folders are written atomically, also where the system has no atomic exchange."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from polyhead.surgery.storage import folders


def test_folders_change_names_also_where_the_system_cannot_do_it_in_one_step(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda name: object())
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    folders._exchange(tmp_path / "new", tmp_path / "old")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["new", "new/old", "old", "old/new"]
    shutil.rmtree(tmp_path / "new")
    shutil.copytree(tmp_path / "old", tmp_path / "again")
    rename = os.rename

    def failing(source, target):
        if Path(source).name == "again":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        folders._exchange(tmp_path / "again", tmp_path / "old")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "again",
        "again/new",
        "old",
        "old/new",
    ]
