"""Files that cannot be written are refused by name, whatever the system says of them."""

from pathlib import Path

import pytest

from diffusiongemma.errors import InputError, check_writable


def test_what_can_be_written(tmp_path: Path) -> None:
    assert check_writable(tmp_path / "new.txt") == tmp_path / "new.txt"
    (tmp_path / "old.txt").write_text("mine")
    check_writable(tmp_path / "old.txt")
    assert (tmp_path / "old.txt").read_text() == "mine"
    assert not (tmp_path / "new.txt").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "it is a folder"), ("no/such.txt", "does not exist"), ("x" * 300, "File name too long")],
)
def test_what_cannot(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        check_writable(tmp_path / name)


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")  # as Python 3.11 has it for a file in such a folder

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(InputError, match="cannot write .*x.svg: Permission denied; name another file"):
        check_writable(tmp_path / "x.svg")
