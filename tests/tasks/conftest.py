"""Tasks are tested in the sandbox of an environment host."""

from tests.host.conftest import arithmetic_folder, keychain_folder, sandbox

__all__ = ["arithmetic_folder", "keychain_folder", "sandbox"]
