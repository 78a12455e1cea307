"""Recipes of container images with the set ``cuda``: ``python -m envs.recipes`` writes `apptainer.def` and `enroot.sh`.

Both copy this checkout into the image and call its installer, so pins are those of this folder.  The base image has the
compiler and headers that Triton needs, and no CUDA: torch and vLLM bring theirs, the driver is the node's.
"""

from __future__ import annotations

from .install import HERE, PINNED_PYTHON

BASE = f"python:{'.'.join(map(str, PINNED_PYTHON))}-bookworm"
FILES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "cli", "envs", "libra_hpc", "sbatch")
"""What `pip install` needs of a checkout."""
CODE, VENV = "/opt/libra-hpc", "/opt/libra"
INSTALL = f"""\
python3 {CODE}/envs/install.py cuda --venv {VENV} --extra compile
{VENV}/bin/python -m pip freeze --exclude-editable >{VENV}/versions.txt
{VENV}/bin/python -c 'import libra_hpc.agent.agent'"""
APPTAINER = """\
# Made by python -m envs.recipes.  In the checkout: apptainer build libra.sif envs/apptainer.def
Bootstrap: docker
From: {base}

%files
{files}

%post
    set -e
{install}

%environment
    export PATH={venv}/bin:$PATH
"""
ENROOT = """\
#!/bin/bash
# Made by python -m envs.recipes.  An image for Pyxis: bash envs/enroot.sh /shared/images/libra.sqsh
set -euo pipefail
image=$(realpath -m "${{1:?name the image, for instance /shared/images/libra.sqsh}}")
checkout=$(dirname "$(dirname "$(realpath "$0")")")
work=$(mktemp -d)
name=libra-hpc-build-$$
trap 'rm -rf "$work"; enroot remove -f "$name" || true' EXIT
enroot import -o "$work/base.sqsh" docker://{base}
enroot create -n "$name" "$work/base.sqsh"
enroot start --root --rw --mount "$checkout:/mnt" "$name" bash -s <<'INSIDE'
set -e
mkdir -p {code}
cd /mnt
cp -r {files} {code}
{install}
echo 'PATH={venv}/bin:/usr/local/bin:/usr/bin:/bin' >>/etc/environment
printf '%s\\n' NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility >>/etc/environment
INSIDE
enroot export -o "$image" "$name"
"""


def rendered() -> dict[str, str]:
    """Text of each recipe, by its file in this folder."""
    apptainer = APPTAINER.format(
        base=BASE,
        files="\n".join(f"    {name} {CODE}/{name}" for name in FILES),
        install="\n".join(f"    {line}" for line in INSTALL.splitlines()),
        venv=VENV,
    )
    enroot = ENROOT.format(base=BASE, files=" ".join(FILES), install=INSTALL, venv=VENV, code=CODE)
    return {"apptainer.def": apptainer, "enroot.sh": enroot}


if __name__ == "__main__":
    for file, text in rendered().items():
        (HERE / file).write_text(text)
