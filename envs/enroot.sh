#!/bin/bash
# Made by python -m envs.recipes.  An image for Pyxis: bash envs/enroot.sh /shared/images/libra.sqsh
set -euo pipefail
image=$(realpath -m "${1:?name the image, for instance /shared/images/libra.sqsh}")
checkout=$(dirname "$(dirname "$(realpath "$0")")")
work=$(mktemp -d)
name=libra-hpc-build-$$
trap 'rm -rf "$work"; enroot remove -f "$name" || true' EXIT
enroot import -o "$work/base.sqsh" docker://python:3.11-bookworm
enroot create -n "$name" "$work/base.sqsh"
enroot start --root --rw --mount "$checkout:/mnt" "$name" bash -s <<'INSIDE'
set -e
mkdir -p /opt/libra-hpc
cd /mnt
cp -r pyproject.toml README.md LICENSE NOTICE cli envs libra_hpc sbatch /opt/libra-hpc
python3 /opt/libra-hpc/envs/install.py cuda --venv /opt/libra --extra compile
/opt/libra/bin/python -m pip freeze --exclude-editable >/opt/libra/versions.txt
/opt/libra/bin/python -c 'import libra_hpc.agent.agent'
echo 'PATH=/opt/libra/bin:/usr/local/bin:/usr/bin:/bin' >>/etc/environment
printf '%s\n' NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility >>/etc/environment
INSIDE
enroot export -o "$image" "$name"
