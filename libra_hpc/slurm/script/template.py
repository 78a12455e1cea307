"""The batch script from its template: the built-in one, or a site's own (``slurm.template``)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from libra_hpc.errors import error_text, invalid


def script_text(site: str, **values: Any) -> str:
    """The batch script, from the template at ``site``; empty: from the built-in one.

    Raises `UserError` where the template cannot be read or rendered.
    """
    source = Path(site) if site else resources.files("libra_hpc_sbatch").joinpath("run.sbatch.j2")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        script = environment.from_string(source.read_text()).render(values)
        if script.startswith("#!") and values["owner"] in script:
            return script
        why = "its script does not begin with '#!', or does not start {{ owner }}"
    except (OSError, ValueError) as error:
        why = f"it cannot be read ({error_text(error)})"
    except Exception as error:  # an expression of the site's may raise anything
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        why = f"{line}{error}".rstrip(".")
    raise invalid("slurm.template", site, why, "a copy of sbatch/run.sbatch.j2 with further lines")
