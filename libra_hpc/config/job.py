"""Sections of the run file about the job: identity, Slurm, compute nodes, components, deadlines, trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from .section import FilePath, Names, Seconds, Section, Steps, Valid

NAME, NAME_LENGTH = r"^[A-Za-z0-9][A-Za-z0-9_.-]*\Z", 64
"""Names of runs and sweeps, which are parts of file names."""
NAME_WORDS = "letters, digits, '_', '.' and '-', a letter or digit first, at most 64 characters"
NO_OPTION = "none"
"""A value that leaves out an option of sbatch."""
Memory = Annotated[str, Valid("a number, one with K, M, G or T, or none"), Meta(pattern=r"^([0-9]+[KMGT]?|none)?\Z")]
MemOption = Literal["--mem", "--mem-per-cpu", "--mem-per-gpu", "none"]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
ShellLine = Annotated[str, Meta(pattern=r"^[^\r\n\x00]+\Z")]
Folder = Annotated[str, Meta(pattern=r"^[^\r\n\x00,]+\Z")]
NodeFolder = Annotated[
    str,
    Valid("an absolute folder; $VARIABLES are those of the node"),
    Meta(pattern=r"^(/([A-Za-z0-9_./-]|\$\w+|\$\{\w+\})*)?\Z"),
]


class RunSection(Section, frozen=True):
    """``[run]``: identity and length of the run."""

    name: Annotated[str, Valid(NAME_WORDS), Meta(pattern=NAME, max_length=NAME_LENGTH)] = "run"
    """Name of the run. Its run directory is ``<dir>/<name>-<number>``."""
    dir: FilePath = "runs"
    """Parent of run directories, on a file system all nodes share."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of the data order and of sampling."""
    steps: Annotated[Steps, Meta(ge=1)] = 100
    """Optimizer steps (global batches) to train."""
    share: Literal["private", "group", "all"] = "private"
    """Who may read the run directory: ``private`` its owner (mode 0700), ``group`` the owner's group (0750), ``all``
    everybody (0755)."""
    transcripts_gb: Annotated[float, Meta(ge=0)] = 4.0
    """Room (GB) for transcripts, the text of the policy (`libra-hpc show`); beyond it the oldest steps are removed. 0:
    none are written."""
    engine: Literal["real", "simulated"] = "real"
    """``real``: GPUs or CPUs do the work. ``simulated``: engines, trainers and tools are simulated
    (``[simulated]``); every other process is real."""


class SlurmSection(Section, frozen=True):
    """``[slurm]``: how the job is queued."""

    executor: Literal["auto", "slurm", "local"] = "auto"
    """``slurm``: sbatch. ``local``: on this machine. ``auto``: Slurm; when no controller answers, an error
    names both ways."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Which wheels and collective backend the engines use."""
    time_limit: str = "01:00:00"
    """Slurm time limit, ``[days-]hours:minutes:seconds``."""
    notice_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """Time before the time limit at which the run begins to save and stop. 0: it stops in time by itself, from the
    measured times of steps and checkpoints."""
    grace_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """Time between SIGTERM and SIGKILL, in which a cancelled or preempted run saves. 0: Slurm's ``KillWait``."""
    requeues: Annotated[int, Meta(ge=0)] = 0
    """Most times that the job is queued again after its time limit, until ``run.steps`` are trained
    (`libra-hpc submit --until-done`). Preemptions count too. 0: it ends, because every start is charged."""
    preempted: Literal["requeue", "stop"] = "requeue"
    """Whether a job is queued again after a preemption, or when it lost a node that its ranks need."""
    account: str = ""
    """Slurm account that is charged; empty: the user's default."""
    qos: str = ""
    """Slurm quality of service; empty: the account's default."""
    interface: Annotated[
        str,
        Valid("the name of an interface, at most 15 characters, or ''"),
        Meta(pattern=r"^[A-Za-z0-9_.:@-]*\Z", max_length=15),
    ] = ""
    """Network interface that MPI and torch's collectives listen on, for instance ``ib0``; empty: each chooses its own
    (docs/network.md)."""
    restarts: Annotated[int, Meta(ge=0)] = 3
    """Most restarts of all ranks from the newest checkpoint, inside the allocation, after the planner or a leader
    died."""
    login_shell: bool = False
    """Whether the batch script runs in a login shell (``bash -l``), for sites that define ``module`` there alone."""
    template: FilePath = ""
    """A site's own template of the batch script, a copy of ``sbatch/run.sbatch.j2`` with further lines (docs/site.md);
    empty: the built-in one."""
    spare: Annotated[int, Meta(ge=0)] = 0
    """Nodes more than the components have. Each replaces one that Slurm sets down, whatever it did: all ranks restart
    on the nodes that are left. Needs components that agree in partition, account, QOS, constraint and GPUs, but for
    ``env``, whose nodes none replaces then."""
    gpu_option: Annotated[
        str,
        Valid("an option of sbatch with {gpus}, and {type} or not; or none"),
        Meta(pattern=r"^(none|--[a-z-]+=[^\s{}]*(\{type\}[^\s{}]*)?\{gpus\}[^\s{}]*)?\Z"),
    ] = "--gres=gpu:{type}:{gpus}"
    """How the cluster spells a request for GPUs of a node; ``{type}`` is left out with its colon where a component
    has no ``gpu_type``. Empty or ``none``: nodes are given whole."""
    mem_option: MemOption = "--mem"
    """The same for memory."""
    mail: str = ""
    """Address that Slurm writes to; empty: nobody."""
    mail_on: list[Literal["BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT", "ALL"]] = field(
        default_factory=lambda: ["END", "FAIL"]
    )
    """Events that Slurm writes about."""
    extra: list[str] = []
    """Further sbatch options, verbatim, for every component, for instance ``--exclusive``."""


class ComputeSection(Section, frozen=True):
    """``[compute]``: how a process starts on a compute node. It is the same for every run of a site, so it belongs
    in the site profile."""

    python: Annotated[str, Names("program")] = ""
    """Interpreter on the compute nodes, for instance ``/shared/libra/bin/python``. Empty: the one that submits; in a
    container ``python3``."""
    container: Literal["none", "apptainer", "pyxis"] = "none"
    """What starts the interpreter inside ``image``: ``apptainer exec``, or Slurm's Pyxis plugin."""
    image: Annotated[str, Names("image")] = ""
    """Container image: a file for Apptainer, a file or ``registry#name`` for Pyxis, which unpacks it once for each run
    and node. ``envs`` has recipes (docs/site.md)."""
    binds: Annotated[list[Folder], Valid("a list of folders, each FOLDER or FOLDER:PLACE")] = []
    """Further folders that the container sees, for instance ``/shared`` or ``/data:/mnt``. It always sees /dev/shm,
    ``local_dir``, and the folders of the run, its model, its task and other files of the run file."""
    setup: Annotated[list[ShellLine], Valid("a list of shell lines")] = []
    """Shell lines that the batch script executes before the agents start, for instance ``module load cuda/12.8``. The
    first command that fails ends the start, and is the cause in `libra-hpc status`."""
    env: Annotated[dict[VariableName, ShellLine], Valid("a table of variables, NAME = 'text'")] = {}
    """Variables of every agent and its engines, for instance ``NCCL_IB_HCA = "mlx5"``. ``$NAME`` and ``${NAME}`` are
    expanded where the job starts, ``$$`` is a dollar sign: ``HF_HOME = "/lustre/$USER/hf"``."""
    shm_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of a node's memory that /dev/shm has; Linux gives it half."""
    local_dir: NodeFolder = ""
    """Node-local folder for temporary files (``TMPDIR``), and for compiled code without ``cache_dir``; for instance
    ``/scratch/$USER``, made where it does not exist; empty: the cluster's."""
    cache_dir: NodeFolder = ""
    """Folder for compiled graphs and kernels (vLLM, Triton, FlashInfer, ..) that all nodes see and no job removes, for
    instance ``/shared/$USER/compiled``: engines of later jobs start without compilation. It is made with mode 0700, and
    refused where others can write: its code is executed. Empty: in ``local_dir``, or where each compiler has its
    own."""


class Component(Section, frozen=True):
    """One component of the job. ``planner`` is rank 0 on one node, ``train`` nodes train, ``rollout``
    nodes generate, ``hybrid`` nodes move between both, ``env`` nodes have environments."""

    nodes: Annotated[int, Meta(ge=0, le=10_000)] = 1
    """Nodes; 0 leaves the component out. A planner of 0 nodes runs on the first train node, beside its agent."""
    partition: str = ""
    """Slurm partition; empty: the cluster's default. ``"a,b"``: Slurm takes the one in which the job starts first."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """GPUs per node."""
    gpu_type: str = ""
    """GRES type of the GPUs, for instance ``a800``; empty: any."""
    cpus: Annotated[int, Meta(ge=0)] = 0
    """CPUs per node; 0: those of the node that belong to its GPUs, and 1 without GPUs."""
    mem: Memory = ""
    """Memory per node, as Slurm writes it; without a unit MiB, and 0 is all memory of the node. Empty: the memory of
    the node that belongs to its GPUs, and 2G without GPUs."""
    constraint: str = ""
    """Node features that sbatch asks for (``--constraint``); empty or ``none``: none."""
    reservation: str = ""
    """Reservation to use; empty or ``none``: none."""
    account: str = ""
    """Slurm account that is charged for these nodes; empty: ``slurm.account``, ``none``: no option."""
    qos: str = ""
    """Quality of service of these nodes; empty: ``slurm.qos``, ``none``: no option."""
    extra: list[str] = []
    """Further sbatch options, verbatim, for these nodes."""


class TrainComponent(Component, frozen=True):
    """The nodes of the trainer's core; they can serve both stages."""

    roll_out: bool = False
    """Whether train nodes roll out, too, while they have nothing to train. Needs ``planner.time_sharing = "auto"``,
    and ``optimizer.host = true`` or adapters on GPUs."""


class HybridComponent(Component, frozen=True):
    """Nodes that move between the stages; there are none unless the run file asks for them."""

    nodes: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Nodes; 0 leaves the component out. A run file that has the section without this key has one."""
    nodes_per_replica: Annotated[int, Meta(ge=1)] = 1
    """Nodes that train as one world, because one cannot hold a replica. They move together."""


class EnvComponent(Component, frozen=True):
    """Nodes with environment hosts and boxes alone; without them the rollout leader's node has all."""

    nodes: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Nodes; 0 leaves the component out. A run file that has the section without this key has one."""
    mem: Memory = "0"
    """Memory per node, as Slurm writes it; 0: all of the node."""
    seats: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Trajectories of a node at once; others wait. 0: as many as ``cpus``."""

    @property
    def room(self) -> int:
        """Seats of a node."""
        return self.seats or max(1, self.cpus)

    @property
    def all_seats(self) -> int:
        """Seats of all nodes; 0: there is no such node, and no bound."""
        return self.nodes * self.room


class ComponentsSection(Section, frozen=True):
    """``[components.*]``: which nodes do what at the start."""

    split: Literal["explicit", "auto"] = "explicit"
    """``explicit``: the nodes given here. ``auto``: `libra-hpc submit` divides all nodes of train, hybrid and rollout
    by the planner's best plan."""
    one_node: bool = False
    """Whether one node carries all agents: a component's ``nodes`` are then parts of it, each with its ``gpus``."""
    planner: Component = Component()
    train: TrainComponent = TrainComponent()
    hybrid: HybridComponent = HybridComponent()
    rollout: Component = Component()
    env: EnvComponent = EnvComponent()


class DeadlinesSection(Section, frozen=True):
    """``[deadlines]``: how long a part of a run may make no progress before its process is ended and restarted."""

    floor_s: Annotated[Seconds, Meta(gt=0)] = 60.0
    """Shortest deadline of any operation."""
    first_s: Annotated[Seconds, Meta(gt=0)] = 900.0
    """Deadline of an operation that was not measured yet: a first step compiles, a first start reads a cold file
    system."""
    factor: Annotated[float, Meta(gt=1, le=1e6)] = 10.0
    """Deadline of a measured operation, as a multiple of the longest of its last durations."""
    restarts: Annotated[int, Meta(ge=1)] = 5
    """Most restarts of one engine, replica or environment host within five minutes. One more restarts all
    ranks."""
    storage_s: Annotated[Seconds, Meta(gt=0)] = 900.0
    """How long writes to the run directory may fail; then the run saves if it can, and stops. Also how long one read or
    write of a saved state may take, and how long a start waits for one that cannot be read."""
    cannot_now_s: Annotated[Seconds, Meta(gt=0)] = 600.0
    """How long a start is tried again that is not possible now; then the run fails. Ranks that met before do not meet,
    a process or a file cannot be had, or Slurm does not answer."""


class WandbSection(Section, frozen=True):
    """``[track.wandb]``: Weights & Biases."""

    project: str = ""
    """Name of the project; empty: not used."""
    entity: str = ""
    """User or team; empty: the default of the account."""
    mode: Literal["offline", "online"] = "offline"
    """``offline``: files below ``track/wandb`` of the run directory, for ``wandb sync`` where there is internet."""


class TrackSection(Section, frozen=True):
    """``[track]``: where metrics go beside ``metrics.jsonl``. Both need ``pip install 'libra-hpc[track]'``."""

    tensorboard: bool = False
    """Write TensorBoard files below ``track/tensorboard`` of the run directory."""
    wandb: WandbSection = WandbSection()

    @property
    def libraries(self) -> dict[str, str]:
        """By key, the module that it needs where the run is tracked."""
        needed = {"tensorboard": ("tensorboardX", self.tensorboard), "wandb": ("wandb", bool(self.wandb.project))}
        return {f"track.{key}": module for key, (module, wanted) in needed.items() if wanted}


Size = Annotated[str, Valid("a number of MiB, or one with K, M, G or T"), Meta(pattern=r"^[0-9]+[KMGT]?\Z")]


class LimitsSection(Section, frozen=True):
    """``[env.limits]``: what one box may use; 0: no limit."""

    memory: Size = "4G"
    """Memory of all its processes, and address space of each."""
    disk: Size = "2G"
    """Its folder, `/tmp` and `/dev/shm` together, a file 4 KiB at least; one file."""
    processes: Annotated[int, Meta(ge=0)] = 256
    """Processes at once."""
    wall_s: Annotated[Seconds, Meta(gt=0)] = 3600.0
    """An agent's own time, without its waits for turns, up to ten times as long; then it is ended, and the reward is
    asked."""


class EnvSection(Section, frozen=True):
    """``[env]``: the box of each episode whose agent is a program (``task.command``, ``task.agent``)."""

    sandbox: Literal["auto", "bwrap", "none"] = "auto"
    """``auto``: ``box``, else bubblewrap, which needs user namespaces. ``none``: a folder and limits alone: what runs
    there can do what you can."""
    box: list[str] = []
    """A command of your own that runs what follows it in a box. ``{root}`` is the folder that it shall see,
    ``{mounts}`` is ``,FILE:PLACE:ro`` for each further one:
    ``["apptainer", "exec", "--containall", "--bind", "{root}:/work{mounts}", "--pwd", "/work", "image.sif"]``."""
    mounts: Annotated[list[str], Names("file")] = []
    """Further folders that a box can read, where they are: an agent's own environment of Python, repositories."""
    unenforced: Literal["refuse", "accept"] = "refuse"
    """What a request asks of a turn's form, and nothing here enforces (``response_format``, ``tool_choice``, efforts of
    thinking): ``refuse`` it, or ``accept`` it as not given and count it (`unenforced_requests`)."""
    network: Literal["none", "host"] = "none"
    """Network of a box. The endpoint is always reached."""
    limits: LimitsSection = LimitsSection()
