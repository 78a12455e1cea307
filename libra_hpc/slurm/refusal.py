"""What a refusal of sbatch means for the run file: a key where it can mean one alone, else Slurm's own sentence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from libra_hpc.config.node_groups import het_groups
from libra_hpc.config.run import RunConfig
from libra_hpc.slurm.queue.query import Partition

from .fit import Doubt, doubts
from .launch import given_options


class Meaning(NamedTuple):
    """What some words of a refusal can mean."""

    words: str
    """A regular expression, in lower case."""
    keys: str
    """Keys; where the run file has none of them, the last one is missing, or has the wrong default."""
    options: str = ""
    """Verbatim options that do the same."""
    doubted: str = ""
    """Further keys, which it means where sinfo says so."""


TIME = Meaning(r"time.?limit|wall.?(clock|duration|time)|--time\b", "slurm.time_limit", "--time-min")
NODE = "components.*.gpus components.*.gpu_type components.*.cpus components.*.mem components.*.nodes"
NODE += " components.*.partition components.one_node slurm.gpu_option"
MEANINGS = (
    TIME,
    Meaning(r"--mem\b|--mem-per", "slurm.mem_option"),
    Meaning(r"--gres\b|--gpus", "slurm.gpu_option"),
    Meaning(r"feature|constraint", "components.*.constraint", "--constraint -C"),
    Meaning(r"node configuration", "", "--constraint -C --nodelist -w --exclude -x --gres", NODE),
    Meaning(r"reservation", "components.*.reservation", "--reservation"),
    Meaning(r"license", "", "--licenses -L"),
    Meaning(r"dependency", "", "--dependency -d"),
    Meaning(r"\bqos\b", "components.*.qos slurm.qos", "--qos -q"),
    Meaning(r"account/partition", "components.*.partition components.*.account slurm.account", "--account -A"),
    Meaning(r"\baccount|\bproject\b", "components.*.account slurm.account", "--account -A"),
    Meaning(
        r"generic resource|\bgres\b|\bgpus?\b",
        "components.*.gpu_type components.*.gpus",
        "--gres",
        "slurm.gpu_option components.one_node",
    ),
    Meaning(r"partition", "components.*.partition"),
    Meaning(r"memory", "components.*.mem slurm.mem_option", doubted="components.one_node"),
    Meaning(r"cpu count|processors|\bcpus?\b", "components.*.cpus", doubted="components.one_node"),
    Meaning(r"node count", "components.*.nodes"),
)
"""The first whose words are there counts."""
POLICY = re.compile(r"job violates accounting/qos policy( \([^)]*\))?")
"""A sentence that names every limit and means one, which another sentence names."""
LIMIT = re.compile(r"\b(qos|assoc)\w*(limit|max|min|grp)")
"""A limit of a QOS or an account: several keys keep within it."""
SPELLED = {
    "slurm.gpu_option": "the cluster's spelling, or none (libra-hpc doctor tries them)",
    "slurm.mem_option": "--mem, --mem-per-cpu, --mem-per-gpu or none (libra-hpc doctor tries them)",
}


def refusal(config: RunConfig, reason: str, partitions: Sequence[Partition]) -> Doubt | None:
    """The mistake behind sbatch's ``reason``; None where its words fit no key, or several."""
    parts = {group.name: getattr(config.components, group.name) for group in het_groups(config)}
    said, options = f"Slurm refuses it ({reason})", list(given_options(config, parts))
    for field, option in options:
        if option.split("=")[0] in reason:
            return Doubt(field, option, said, "")
    meaning = _meaning(POLICY.sub("", reason.lower()))
    if meaning is None:
        return None
    keys = meaning.keys.split()
    doubted = _doubted(doubts(config, partitions), {*keys, *meaning.doubted.split()})
    if len(doubted) == 1:
        return doubted[0]._replace(why=f"{doubted[0].why} (Slurm: {reason})")
    found = [one for one in options if one[1].startswith(tuple(meaning.options.split()) or "none")]
    found = found or _given(config, parts, keys) or _missed(config, keys)
    if len(found) != 1:
        return None
    field, value = found[0]
    return Doubt(field, value, said, SPELLED.get(field, ""))


def _meaning(text: str) -> Meaning | None:
    meaning = next((one for one in MEANINGS if re.search(one.words, text)), None)
    return None if meaning is not TIME and LIMIT.search(text) else meaning


def _doubted(found: Sequence[Doubt], keys: Collection[str]) -> list[Doubt]:
    """Doubts about the keys; components that agree are in doubt together."""
    different: dict[tuple[object, ...], Doubt] = {}
    for doubt in found:
        key = re.sub(r"^components\.\w+\.", "components.*.", doubt.field)
        if key in keys:
            different.setdefault((key, doubt.value, doubt.why), doubt)
    return list(different.values())


def _missed(config: RunConfig, keys: Sequence[str]) -> list[tuple[str, Any]]:
    """The last key, where the run file has none of them: Slurm misses it, or its default is wrong here."""
    return [(key, getattr(config.slurm, key.rpartition(".")[2], "")) for key in keys[-1:]]


def _given(config: RunConfig, parts: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[str, Any]]:
    """The keys that the run file or the site profile has, the first of each value."""
    found: dict[Any, str] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        for part, holder in parts.items() if section == "components.*" else [("", config.slurm)]:
            field = key.replace("*", part)
            if (value := getattr(holder, name)) and field in config.given:
                found.setdefault(value, field)
    return [(field, value) for value, field in found.items()]
