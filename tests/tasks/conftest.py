"""Tasks are tested in the sandbox of an environment host."""

from tests.host.conftest import keychain_folder, sandbox, text_folder

__all__ = ["keychain_folder", "sandbox", "text_folder"]
