"""Tasks are tested in the sandbox of an environment host."""

from tests.host.conftest import arithmetic_folder, in_sandbox, keychain_folder

__all__ = ["arithmetic_folder", "in_sandbox", "keychain_folder"]
