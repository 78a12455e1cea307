"""The embedded cluster's configuration files, as pure functions of `ClusterFacts`.

- Virtual nodes: one slurmd per node on one machine, each with its own name and port.
- They have the shape of real A800 nodes whatever the machine has (``config_overrides``), so run files for a real
  cluster are accepted unchanged.
- Fake GPUs are links to ``/dev/null``: slurmd refuses plain files, and drains a node with a count but no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .packages import SlurmTools


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one shape, named ``<prefix>-0`` upwards."""

    prefix: str
    count: int
    sockets: int
    cores: int
    """Cores per socket."""
    memory_mb: int
    gpus: int = 0
    gpu_type: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}-{index}" for index in range(self.count))

    @property
    def hostlist(self) -> str:
        """All nodes in Slurm's notation."""
        return f"{self.prefix}-[0-{self.count - 1}]"


GPU_NODES = NodeGroup("a800", 6, sockets=2, cores=32, memory_mb=1_000_000, gpus=8, gpu_type="a800")
CPU_NODES = NodeGroup("cpu", 2, sockets=2, cores=32, memory_mb=256_000)
GROUPS = (GPU_NODES, CPU_NODES)
NODES = tuple(name for group in GROUPS for name in group.names)
PARTITIONS = ("a800", "spot", "cpu")

LONGEST_HOME = 60
"""Characters.  A Unix socket path has at most 107, of which slurmstepd appends 45
(``/spool/a800-0/a800-0_50000000.4294967291``)."""


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about the machine that the files depend on."""

    home: Path
    host: str
    """This machine's name as ``gethostname`` gives it: slurmctld compares it."""
    address: str
    """IPv4 address of the name; empty: it does not resolve, and the daemons listen on every interface (munge still
    guards them)."""
    user: str
    ports: Mapping[str, int]
    """Port of ``slurmctld`` and of each node's slurmd."""
    first_job_id: int


def munge_socket(home: Path) -> Path:
    """Socket of the cluster's own munged."""
    return home / "run" / "munge.socket"


def slurm_conf(site: ClusterFacts, tools: SlurmTools) -> str:
    """Text of ``slurm.conf``."""
    home, address = site.home, site.address or "127.0.0.1"
    # Only the address of the host name: where it is a loopback address, the ports are not on the network.
    binding = "NoAddrCache,NoInAddrAny,NoCtldInAddrAny" if site.address else "NoAddrCache"
    lines = [
        "ClusterName=libra",
        f"PluginDir={tools.plugins}",
        # MPICH names shared memory by job and step, so an id must never repeat.
        f"FirstJobId={site.first_job_id}",
        f"SlurmctldHost={site.host}({address})",
        f"SlurmctldPort={site.ports['slurmctld']}",
        f"SlurmUser={site.user}",
        f"SlurmdUser={site.user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # A requeued job waits until the old credentials have expired: less than the default of 120 s.
        f"AuthInfo=socket={munge_socket(home)},cred_expire=15",
        f"CommunicationParameters={binding}",
        f"StateSaveLocation={home}/state",
        f"SlurmdSpoolDir={home}/spool/%n",
        f"SlurmctldPidFile={home}/run/slurmctld.pid",
        f"SlurmdPidFile={home}/run/slurmd.%n.pid",
        f"SlurmctldLogFile={home}/log/slurmctld.log",
        f"SlurmdLogFile={home}/log/slurmd.%n.log",
        f"TmpFS={home}/tmp/%n",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={home}/log/jobs.txt",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # Without a default a job that names no memory takes a whole node.
        "DefMemPerCPU=1000",
        "GresTypes=gpu",
        "SlurmdParameters=config_overrides",
        # As at most sites: a node that somebody set down stays down, one that only did not answer comes back.
        "ReturnToService=1",
        # Refuse at once what no partition could ever start.
        "EnforcePartLimits=ALL",
        # Only the backfill scheduler starts heterogeneous jobs, so it runs every second.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,bf_resolution=1,preempt_youngest_first",
        "SlurmctldParameters=preempt_send_user_signal",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        "KillOnBadExit=0",
        "KillWait=10",
        # Seconds that finished jobs stay visible: without accounting the only record of how they ended.
        "MinJobAge=3600",
        # Starting engines may saturate the machine; a slow answer must not count as a dead daemon.
        "MessageTimeout=60",
        "TCPTimeout=10",
        "BatchStartTimeout=60",
        "SlurmctldTimeout=120",
        "SlurmdTimeout=120",
        "MailProg=/bin/true",
    ]
    for group in GROUPS:
        gres = f" Gres=gpu:{group.gpu_type}:{group.gpus}" if group.gpus else ""
        shape = (
            f"Boards=1 Sockets={group.sockets} CoresPerSocket={group.cores} ThreadsPerCore=1"
            f" RealMemory={group.memory_mb}{gres} State=UNKNOWN"
        )
        lines += [
            f"NodeName={name} NodeHostname={site.host} NodeAddr={address} Port={site.ports[name]} {shape}"
            for name in group.names
        ]
    gpu, cpu = GPU_NODES.hostlist, CPU_NODES.hostlist
    lines += [
        f"PartitionName=a800 Nodes={gpu} Default=YES MaxTime=INFINITE State=UP PriorityTier=10",
        f"PartitionName=spot Nodes={gpu} MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5",
        f"PartitionName=cpu Nodes={cpu} MaxTime=INFINITE State=UP PriorityTier=10",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(home: Path) -> str:
    """Text of ``gres.conf``."""
    return "".join(
        f"NodeName={group.hostlist} Name=gpu Type={group.gpu_type} File={home}/fakedev/nvidia[0-{group.gpus - 1}]\n"
        for group in GROUPS
        if group.gpus
    )
