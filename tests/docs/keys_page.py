"""The page of all keys of a run file: ``python -m tests.docs.keys_page > docs/configuration.md``."""

from __future__ import annotations

import re
import textwrap

from libra_hpc.config.reference import PATHS, WIDTH, as_text, select, tables

EXAMPLE = "rollout.max_model_len"
SITE = re.compile(r"\s+Also\s+allowed\s+in:\s+site\s+profile\.")
_PAGE = """\
# Which keys can a run file have?

```
libra-hpc config explain [SECTION | SECTION.KEY] [--run RUN.toml] [--json]
```

explains all keys, those of a section, or one. With `--run` it adds the present
value in a run file or a run. For example:

```console
$ libra-hpc config explain {name}
{example}
```

- A run file is TOML. A key that is left out has its default.
- An unknown key is an error, and so is a value of another type.
{paths}
- `-o section.key=value` replaces one value for one command.
- Keys marked *(site)* may stand in a site profile as well (site.md).
- `libra-hpc config show RUN.toml` prints the file with all defaults as JSON.
  With `--toml` it prints a run file without the defaults. A run is shown as
  well: `config show RUN`.
- `libra-hpc check RUN.toml` checks the file, its model, its task and the
  cluster.

This page is written by `python -m tests.docs.keys_page`.

{tables}"""


def page() -> str:
    """The text of ``docs/configuration.md``."""
    everything = as_text(tables()).removesuffix(f"\n{textwrap.fill(PATHS, WIDTH)}\n")
    return _PAGE.format(
        name=EXAMPLE,
        example=as_text(select(EXAMPLE)).rstrip(),
        paths=textwrap.fill(f"- {PATHS}", WIDTH, subsequent_indent="  "),
        tables=SITE.sub("\n  *(site)*", everything),
    )


if __name__ == "__main__":
    print(page(), end="")
