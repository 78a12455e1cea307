"""The device table, a user's own file, and the errors of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.models import devices as module
from libra_hpc.models.devices import device, devices

MI250X = """
["mi250x"]
memory_bytes = 68.7e9
peak_flops = 191.5e12
hbm_bytes_s = 1.6e12
intra_bytes_s = 100e9
inter_bytes_s = 12.5e9
devices_per_node = 8
"""


def test_the_a800_is_an_a100_with_two_thirds_of_its_links() -> None:
    a100, a800 = device("a100"), device("A800-SXM")
    assert (a800.memory_bytes, a800.peak_flops, a800.hbm_bytes_s) == (
        a100.memory_bytes,
        a100.peak_flops,
        a100.hbm_bytes_s,
    )
    assert a800.intra_bytes_s / a100.intra_bytes_s == pytest.approx(400 / 600)


def test_every_builtin_device_is_there_under_its_name() -> None:
    assert set(devices()) == {"a100", "a800", "h100", "h800", "h200"}
    assert all(device(name).name == name for name in devices())


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        UserError,
        match=r"device = 'a80': unknown device; valid: a100, a800, h100, h200, h800 \(did you mean 'a800'\?\)",
    ):
        device("a80")


def test_a_user_file_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MI250X + MI250X.replace("mi250x", "a100"))
    assert device("MI250X", path).hbm_bytes_s == 1.6e12
    assert device("a100", path).memory_bytes == 68.7e9
    assert device("h100", path) == device("h100")


def test_the_example_of_the_docstring_is_valid(tmp_path: Path) -> None:
    assert module.__doc__ is not None
    example = module.__doc__[module.__doc__.index('["mi250x"]') :]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(line.strip() for line in example.splitlines()))
    assert device("mi250x", path).peak_flops == 191.5e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mi250x", "device file"),
        ("mi250x = 3", "'mi250x' is not a table"),
        (MI250X.replace("hbm_bytes_s = 1.6e12", ""), "missing required field `hbm_bytes_s`"),
        (MI250X + "hbm = 3", "unknown field `hbm`"),
        (MI250X.replace("68.7e9", "-1"), "memory_bytes"),
        (MI250X.replace("68.7e9", "nan"), "memory_bytes"),
        (MI250X + "hbm_efficiency = 1.2", r"a number in \(0, 1\]"),
        (MI250X + "kernel_s = -1e-6", "a number >= 0"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        device("mi250x", path)


def test_a_missing_file_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        device("a100", tmp_path / "none.toml")
