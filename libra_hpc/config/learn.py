"""Sections of the run file about model, task, learning algorithm, training and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from libra_hpc.user_file import file_of

from .section import (
    PATH,
    Bytes,
    CodePath,
    FilePath,
    Mebibytes,
    ModelName,
    Names,
    Seconds,
    Section,
    Steps,
    Tokens,
    Valid,
)
from .work import UNSAID, WorkSection

Recompute = Literal["none", "selective", "full"]
ADVANTAGES, LOSSES = ("group_std", "group_mean", "rloo", "none"), ("ppo", "gspo", "cispo")
"""Names of ``algorithm.advantage`` and ``algorithm.loss``."""

Share = Annotated[float, Meta(gt=0, lt=1)]
INITIAL = "initial"
"""The reference policy that the run starts from."""
MIXTURE = "mixture"
"""The task that several tasks are together."""
AGENT = "agent"
"""The task whose agent is a program."""
VERIFIERS = "verifiers"
"""The task whose agent, rows and reward are a taskset of verifiers."""
GYM = "reasoning_gym"
"""Before the colon in the name of a data set of `reasoning-gym`."""
Clip = Annotated[
    Share | Annotated[list[Share], Meta(min_length=2, max_length=2)],
    Valid("a number > 0 and < 1, or two of them: below and above a ratio of 1"),
]

Ratios = Annotated[list[Annotated[float, Meta(ge=0)]], Meta(max_length=2), Valid("[], or [low, high], both >= 0")]


class ModelSection(Section, frozen=True):
    """``[model]``: the policy."""

    path: Annotated[ModelName, Valid(PATH)] = ""
    """Hugging Face folder (config.json, safetensors, tokenizer), on the shared file system."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of weights and activations in training and rollout."""


class TaskTable(Section, frozen=True):
    """What one task is made of."""

    data: FilePath = ""
    """Rows to train on: a JSONL or Parquet file, or a folder of one split of Hugging Face `datasets`. All but JSONL
    needs the extra ``libra-hpc[parquet]``."""
    prompt: str = ""
    """Column of the prompt, text or a list of messages; empty: ``prompt``."""
    reward: CodePath = ""
    """Reward function, ``path/to/file.py:function``: ``def score(row, text)`` returns a number, or a dict of parts.
    With an agent: ``async def score(row, box)``."""
    command: list[str] = []
    """The agent is this program: it finds the policy at ``OPENAI_BASE_URL`` or ``ANTHROPIC_BASE_URL``, and
    ``{prompt}``, ``{COLUMN}`` are values of its row."""
    agent: CodePath = ""
    """The agent is this coroutine, ``path/to/file.py:function``: ``async def run(row, endpoint, box)``."""
    verifiers: Annotated[dict[str, Any], Names("taskset")] = {}
    """Instead of data, reward and agent, a taskset of verifiers: ``taskset`` (installed, or its file), ``python`` (of
    ``envs/verifiers.txt``), and verifiers' own tables ``env`` and ``select``."""
    options: dict[str, Any] = {}
    """Arguments of the task's constructor, by name."""

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Arguments of the task's constructor."""
        given = {key: getattr(self, key) for key in ("data", "prompt", "reward", "command", "agent")}
        return {**{name: value for name, value in given.items() if value}, **self.verifiers, **self.options}


class NamedTask(TaskTable, frozen=True):
    """One of several tasks of a run."""

    name: Annotated[str, Valid("letters, digits, '_', '.' and '-'"), Meta(pattern=r"^[A-Za-z0-9_.-]*\Z")] = ""
    """What it is called, also in columns such as ``name/reward``."""
    task: CodePath = "data"
    """``data``, ``reasoning_gym:NAME``, or ``path/to/file.py:ClassName``."""


class TrainPart(NamedTask, frozen=True):
    """``[[task.train]]``: one of several tasks of a run."""

    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Prompts of it among ``sum of weights`` prompts in a row of the data order; exactly so many."""
    work: WorkSection = UNSAID


class EvalPart(NamedTask, frozen=True):
    """``[[task.eval]]``: an evaluation during the run, on prompts of its own."""

    every: Annotated[Steps, Meta(ge=1)] = 20
    """Steps between two evaluations; one is before the first step, one after the last."""
    prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Prompts of an evaluation, the first ones of its data order."""
    samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Trajectories of each prompt."""
    solved: str = ""
    """Part of the reward that shows whether a trajectory is solved, for pass@k; ``reward``: the reward. Empty: also
    that, where all rewards are from 0 to 1; else there is no pass@k."""
    solved_at: float = 1.0
    """Least value that is solved."""


class TaskSection(TaskTable, frozen=True):
    """``[task]``: the environment."""

    name: CodePath = ""
    """``reasoning_gym:NAME``, or ``path/to/file.py:ClassName``; with ``data`` alone it is ``data``."""
    work: WorkSection = UNSAID
    train: list[TrainPart] = []
    """Several tasks instead of one, each a table ``[[task.train]]``."""
    eval: list[EvalPart] = []
    """Evaluations during the run, each a table ``[[task.eval]]``."""
    trial: bool = True
    """Play the start of one episode where the job is submitted, before it is queued. false: for a task that needs what
    only the nodes have."""
    tool_timeout_s: Annotated[Seconds, Meta(gt=0)] = 10.0
    """Wall-clock limit of one tool call. A task may declare longer ones by tool (`Task.tool_limits`)."""
    tool_memory_mb: Annotated[Mebibytes, Meta(ge=16)] = 512
    """Address-space limit of a tool process."""
    tool_output_bytes: Annotated[Bytes, Meta(ge=64)] = 65536
    """Longest output of a tool; the rest is cut off."""
    hosts: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Environment host processes, all on the rollout leader's node."""
    tool_processes: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Most sandboxed tool processes per host. One is started at once, others while calls wait."""
    max_failed_share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Share of the open trajectories that fail, above which no prompt is admitted until an attempt succeeds. One fails
    when two attempts in a row did: the environment raises, times out or answers what cannot be used."""
    failed_patience_s: Annotated[Seconds, Meta(gt=0)] = 600.0
    """How long that may last. Then the run fails with the most frequent error."""

    @property
    def works(self) -> dict[str, tuple[str, int, WorkSection]]:
        """Name, weight and work of every task that is trained, by the table of its work."""
        parts = {f"task.train.{place}.work": (one.name, one.weight, one.work) for place, one in enumerate(self.train)}
        return {
            field: (name, weight, self.work if work == UNSAID else work)
            for field, (name, weight, work) in (parts or {"task.work": ("", 1, self.work)}).items()
        }

    @property
    def host_task(self) -> str:
        """The task that hosts construct, by name."""
        return MIXTURE if self.train or self.eval else self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor of `host_task`, of a mixture its parts."""
        if self.host_task != MIXTURE:
            return self.own_arguments
        alone = [{"name": "", "task": self.name, "weight": 1, "options": self.own_arguments}]
        parts = [
            {"name": one.name, "task": one.task, "weight": one.weight, "options": one.own_arguments}
            for one in self.train
        ]
        evals = [{"name": one.name, "task": one.task, "options": one.own_arguments} for one in self.eval]
        return {"parts": parts or alone, "evals": evals}

    @property
    def tables(self) -> dict[str, tuple[str, TaskTable]]:
        """By the key that names its class, every task: that name and its table."""
        found: dict[str, tuple[str, TaskTable]] = {} if self.train else {"task.name": (self.name, self)}
        for section, parts in (("train", self.train), ("eval", self.eval)):
            found |= {f"task.{section}.{place}.task": (one.task, one) for place, one in enumerate(parts)}
        return found

    @property
    def code_files(self) -> list[Path]:
        """Python files of the classes and reward functions of every task."""
        names = (name for kind, table in self.tables.values() for name in (kind, table.reward, table.agent))
        own = [str(table.verifiers.get("taskset", "")) for _, table in self.tables.values()]
        files = [Path(name) for name in own if name.endswith(".py")]
        return files + [file for name in names if (file := file_of(name)) is not None]


class ChatSection(Section, frozen=True):
    """``[chat]``: tasks of messages and tools (`ChatTask`)."""

    thinking: Literal["keep", "template"] = "keep"
    """``keep``: what the policy thought stays in the context, so a trajectory is one sequence. ``template``: where the
    model's template drops old thinking, the next context is rendered again, an agent's too: it is several."""
    max_bad_calls: Annotated[int, Meta(ge=0)] = 3
    """Tool calls of one episode that reach no tool, past which it ends: unknown name, bad JSON, wrong arguments."""


class AlgorithmSection(Section, frozen=True):
    """``[algorithm]``: GRPO and its asynchronous bound."""

    prompts_per_step: Annotated[int, Meta(ge=1)] = 8
    """Prompts (groups) of one global batch, B."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Trajectories sampled per prompt, n."""
    eta: Annotated[int, Meta(ge=0)] = 1
    """Staleness bound: most weight versions between the one a sample was first sampled under and its training; 0 is
    synchronous."""
    batch_order: Literal["data", "finish"] = "data"
    """``data``: prompts are trained in the data's order; every batch is an unbiased draw. ``finish``: first finished,
    first trained, within eta; less waiting for slow groups, but every other batch leans towards short ones."""
    advantage: CodePath = "group_std"
    """Advantages within a group: ``group_std`` (GRPO: reward less the mean, over the standard deviation),
    ``group_mean`` (Dr. GRPO: not divided), ``rloo`` (less the mean of the others), ``none`` (0: a teacher alone), or
    ``path/to/file.py:function``, which gets the rewards and returns as many numbers. A second argument gets lists of
    the rewards of turns; then each result may be a list, too."""
    loss: CodePath = "ppo"
    """Loss of a token: ``ppo`` (its own ratio is clipped; GRPO, DAPO), ``gspo`` (the ratio of its sequence), ``cispo``
    (the ratio is a bounded weight), or ``path/to/file.py:function`` like those of ``libra_hpc/trainer/losses.py``."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """What weighs the same in a minibatch: ``token``; ``sequence``: each trajectory's mean over the tokens of all its
    samples; ``constant``: sums over trajectories of ``rollout.max_model_len`` tokens each (Dr. GRPO)."""
    clip: Clip = 0.2
    """Clip range of the ratio pi_theta / pi_proximal around 1; ``[0.2, 0.28]``: below and above it."""
    is_truncation: Annotated[float, Meta(ge=1)] = 2.0
    """Upper bound of the truncated importance weight pi_proximal / pi_behaviour."""
    mask_tokens: Ratios = []
    """Tokens whose ratio pi_proximal / pi_behaviour is outside are not trained on (IcePop)."""
    mask_sequences: Ratios = []
    """Sequences, by the product over their tokens (MIS: ``[0.0, 2.0]``)."""
    truncated: Literal["score", "zero", "mask"] = "score"
    """Trajectories whose context was full: ``score``: the task's reward counts; ``zero``: reward 0; ``mask``: they are
    neither trained on nor in their group's mean."""
    overlong_soft: Annotated[Tokens, Meta(ge=0)] = 0
    """Last tokens of ``rollout.max_model_len`` over which up to 1 is taken from the reward, linearly (DAPO); 0: none.
    Columns have the reward without it."""
    refill: bool = False
    """Groups whose rewards are equal within 1e-6, before ``overlong_soft``, are not trained: the next prompts take
    their places (DAPO's dynamic sampling). Columns are of the groups that are trained; ``equal_groups`` counts both."""
    refill_batches: Annotated[int, Meta(ge=1)] = 4
    """Most groups that others replace for one step, in global batches; those beyond have no advantage."""
    minibatches: Annotated[int, Meta(ge=1)] = 1
    """Optimizer steps per global batch."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL term to the behaviour policy."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of KL terms: ``k1`` log(pi / q), ``k2`` half its square, ``k3`` q / pi - 1 - log(q / pi)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where they count: a term of the ``loss``, or taken from each token's advantage (``reward``)."""
    reference: Annotated[str, Names("reference")] = INITIAL
    """Reference policy, frozen: ``initial`` (the weights of ``model.path``, also in a resumed run), or the folder of a
    model with the same tokenizer, of any supported shape: a teacher (docs/algorithms.md)."""
    reference_kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL term to the reference policy; above 0 each training world holds its weights in host memory, and
    a step has one forward pass more."""
    routing: Literal["rollout", "own"] = "rollout"
    """Experts of a mixture's tokens in the trainer: the engines', or its own (docs/models.md)."""
    skip_zero_advantage: bool = True
    """Leave out groups of equal rewards, where no KL term gives them a gradient."""
    guard: Literal["off", "notice", "pause", "stop"] = "pause"
    """What follows when learning breaks (docs/faults.md). A notice comes first. ``pause``: 15 steps later the run saves
    and ends as paused. ``stop``: it saves and fails. ``notice``: it goes on. ``off``: nothing is compared. A good
    checkpoint is retained meanwhile."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Below and above a ratio of 1."""
        low, high = self.clip if isinstance(self.clip, list) else (self.clip, self.clip)
        return low, high

    @property
    def has_reference(self) -> bool:
        """Whether the trainer holds a reference policy."""
        return self.reference_kl_coef > 0

    def reference_folder(self, initial: str) -> str:
        """Return the folder of the reference policy of a policy that starts from ``initial``; empty: there is none."""
        if not self.has_reference:
            return ""
        return initial if self.reference == INITIAL else self.reference


class LoraSection(Section, frozen=True):
    """``[lora]``: low-rank adapters, which are trained in the place of the weights."""

    rank: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Rank of every adapter; 0: all weights are trained."""
    alpha: Annotated[float, Meta(gt=0)] = 32.0
    """Adapters are added to the weights times ``alpha / rank``."""
    targets: list[Literal["attention", "mlp", "experts"]] = []
    """What has adapters: projections of ``attention``, the ``mlp`` of every token, routed ``experts``. []: all."""

    @property
    def arguments(self) -> tuple[int, float, list[str]]:
        """Arguments of `libra_hpc.models.adapters.with_adapters`."""
        return self.rank, self.alpha, list(self.targets)


class OptimizerSection(Section, frozen=True):
    """``[optimizer]``: AdamW."""

    lr: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    """Learning rate after the warm-up."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of the mean of squared gradients."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """Term that keeps the update's denominator above zero."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay."""
    grad_clip: Annotated[float, Meta(gt=0)] = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Optimizer updates over which the learning rate rises linearly; ``algorithm.minibatches`` of them are a step."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls to 0 behind the last update."""
    decay_steps: Annotated[int, Meta(ge=0)] = 0
    """Last updates, over which it does; 0: all after the warm-up."""
    host: bool = False
    """Whether AdamW's state is in host memory, and streams through the device at each update. The results are the
    same."""


class TrainSection(Section, frozen=True):
    """``[train]``: Megatron. All core training nodes form one world, a hybrid node that trains one of its own.

    Their processes are divided into data-parallel replicas of ``tp * pp * cp`` processes. A replica of the core may
    span nodes.
    """

    tp: Annotated[int, Meta(ge=1)] = 1
    """Tensor parallelism of a replica; within a node."""
    pp: Annotated[int, Meta(ge=1)] = 1
    """Pipeline parallelism of a replica."""
    cp: Annotated[int, Meta(ge=1)] = 1
    """Context parallelism of a replica: this many processes share the tokens of a micro-batch."""
    ep: Annotated[int, Meta(ge=1)] = 1
    """Expert parallelism: the experts of a layer are spread over this many data-parallel or context ranks."""
    etp: Annotated[int, Meta(ge=0)] = 0
    """Tensor parallelism of an expert: 1 or ``tp``. 0: ``tp``."""
    processes: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Training processes of a node. 0: one for each GPU that whole replicas take; without GPUs those of one replica."""
    micro_tokens: Annotated[Tokens, Meta(ge=64, le=2**24)] = 8192
    """Most tokens of one packed micro-batch. Not given, on CPUs halved until it fits."""
    recompute: Recompute = "none"
    """What a layer computes again in the backward pass instead of storing it. ``"selective"``: norms, the MLP's gated
    product and attention's padding, which saves a third of a layer's memory for a few per cent more work. ``"full"``:
    all but the layer's input, which leaves a twentieth for a third more work. ``true`` and ``false`` are ``"full"`` and
    ``"none"``. ``components.split = "auto"`` chooses it where it is not given."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """CPU threads per worker process."""
    snapshot_every: Annotated[Steps, Meta(ge=0)] = 4
    """Steps between snapshots in /dev/shm; 0: none. With one core training node a killed worker starts from one and
    replays the steps since. With several each node has a copy of another's part. All ranks, and the next job, start
    from the newest snapshot or checkpoint."""


class CheckpointSection(Section, frozen=True):
    """``[checkpoint]``: what survives the job."""

    every: Annotated[Steps, Meta(ge=0)] = 50
    """Steps between checkpoints; 0: only at the end."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """Number of newest checkpoints that are retained."""
    best: str = ""
    """Name of an evaluation (``[[task.eval]]``): the checkpoint of its best mean is retained too. It is of exactly that
    step where ``every`` here divides ``every`` there."""
    experience: bool = True
    """Write finished trajectories to the recovery log, so that a restart trains them: about 9 bytes a token, for up
    to 2 (eta + 1) batches. Unfinished ones are sampled again after a crash, so up to eta + 1 batches lean towards
    short ones. ``false``: all are sampled again."""
