"""The settings: one frozen tree, every default in it, nothing converted in silence.

Reading TOML files, ``extends`` and ``--set`` are in ``config_file.py``; here is only what there *is* to set.
Every field's description becomes its help text in the JSON schema (``lockstep config --schema``).
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LARGEST_COUNT = 2**31 - 1
"""Steps and updates are counted in int32 on the device."""

LONGEST_TIMEOUT = 1e6
"""JAX counts a timeout in int32 milliseconds."""

MOST_DEVICES = {"cpu": 1024, "gpu": 65536, "auto": 65536}
"""In a mesh, by platform; the CPU emulates them all on one host."""

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Timeout = Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
ImportPath = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", json_schema_extra={"format": "import-path"}),
]
RunName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=200, json_schema_extra={"format": "run-name"})
]
SourceName = Literal["digits", "text", "npz", "tokens", "images", "arrayrecord", "synthetic"]
"""The data sources that need no import path; ``typing.get_args`` lists them."""
OptimizerName = Literal["sgd", "adamw", "lamb", "lion", "onebit_adam"]
"""The optimizers that need no import path; ``typing.get_args`` lists them."""
AlgorithmName = Literal["xla", "ring", "tree", "hierarchical", "central"]
"""How contributions are summed, in the order that lists keep to; central only to be measured against."""
AcrossName = Literal["ring", "tree", "xla"]
"""How the hierarchical one goes across nodes."""
CompressName = Literal["slow", "all"]
"""Where a codec is used: across nodes only, or everywhere."""
WITH_CODEC: Mapping[CompressName, tuple[AlgorithmName, ...]] = MappingProxyType(
    {"slow": ("hierarchical",), "all": ("xla", "ring", "tree")}
)
"""Which algorithms go with a codec: only the hierarchical one can compress across nodes alone, and only a flat one
everywhere; central is not among them, for it is there to be measured against. "auto" goes with either."""
CodecName = Literal["none", "bf16", "fp16", "int8", "int4", "sign", "topk", "randomk", "powersgd"]
"""How contributions are written on the wire; the rows of ``trainer.sync.codecs.CODECS``, and none."""


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FrozenList = BeforeValidator(_freeze)
"""TOML arrays become tuples, so that a settings tree is really frozen."""


def _freeze_args(table: Any) -> Any:
    return {key: _freeze_item(key, item) for key, item in table.items()} if isinstance(table, dict) else table


def _freeze_item(key: Any, value: Any) -> Any:
    """A free-form value as TOML knows it: arrays become tuples, and what TOML cannot hold is refused."""
    if not isinstance(key, str):
        raise ValueError(f"{key}: a key must be a text")
    if isinstance(value, dict):
        return {name: _freeze_item(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_freeze_item(key, item) for item in value)
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{key}: nan equals nothing, not even itself, so that no resume could match it")
    if not isinstance(value, str | int | float | datetime.date | datetime.time):
        raise ValueError(f"{key}: TOML cannot hold a value of type {type(value).__name__}")
    return value


Args = Annotated[dict[str, Any], BeforeValidator(_freeze_args)]
"""A free-form table: keywords for something that is named by import path."""


def _refuse(problems: Sequence[str]) -> None:
    """Raises one error for all ``problems``, each of the form 'key: what is wrong', the key relative to its table."""
    if problems:
        raise ValueError("\n".join(problems))


def _multiples(number: int, of: int) -> str:
    """The positive multiples of ``of`` next to ``number`` that are allowed, for a message."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if 0 < n <= LARGEST_COUNT)


class Settings(BaseModel):
    """Base of every table: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Run(Settings):
    """What is run, and for how long."""

    name: RunName = "run"
    """Names the run directory: letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seeds the parameters, the data order, dropout and augmentation."""
    num_steps: PositiveInt = 1000
    """Batches to consume in all, over all attempts."""
    eval_every_steps: NonNegativeInt = 0
    """Evaluate on the test split every so many steps, and at the end; 0: only at the end."""


class TaskSettings(Settings):
    """Which model is trained."""

    target: ImportPath
    """The task's import path, 'package.module:Class'; see trainer/task.py for what it must offer."""
    args: Args = Field(default_factory=dict)
    """Keywords for the task's constructor."""


class Data(Settings):
    """Which examples it is trained on."""

    source: SourceName | ImportPath
    """digits, text, npz, tokens, images, arrayrecord, synthetic, or the import path of your own source."""
    global_batch: PositiveInt
    """Examples in one step over all replicas and virtual replicas."""
    num_threads: Annotated[int, Field(ge=1, le=256)] = 2
    """Threads of each process that read examples ahead of the device."""
    prefetch_batches: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches of each process that are kept ready ahead of the device."""
    args: Args = Field(default_factory=dict)
    """Keywords for the source's constructor."""


_ADAM_LIKE = ("adamw", "lamb", "lion", "onebit_adam")
_USERS = {
    "momentum": ("sgd",),
    "nesterov": ("sgd",),
    "beta1": _ADAM_LIKE,
    "beta2": _ADAM_LIKE,
    "eps": ("adamw", "lamb", "onebit_adam"),
}
"""The optimizers that read a setting; any other would ignore it in silence, and so refuses it."""


class Optimizer(Settings):
    """How parameters follow gradients."""

    name: OptimizerName | ImportPath = "adamw"
    """sgd, adamw, lamb, lion, onebit_adam (Adam whose momentum is what sync.codec compresses, after sync.warmup_steps),
    or the import path of a function (learning_rate, **args) -> optax transformation."""
    learning_rate: NonNegativeFloat = 1e-3
    """The peak, reached after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: nothing, or a linear or cosine decay to final_fraction over the rest of the run."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly from 0 to its peak."""
    final_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """The learning rate at the end of a decay, as a fraction of the peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    clip_norm: Annotated[float, Field(ge=0)] = float("inf")
    """Limit on the global norm of the exchanged gradient; inf: no limit."""
    momentum: Fraction = 0.0
    """Of sgd."""
    nesterov: bool = False
    """Of sgd."""
    beta1: Fraction = 0.9
    """Of adamw, lamb, lion and onebit_adam."""
    beta2: Fraction = 0.999
    """Of adamw, lamb, lion (for lion 0.99 is usual) and onebit_adam."""
    eps: PositiveFloat = 1e-8
    """Of adamw, lamb and onebit_adam."""
    accumulate_steps: PositiveInt = 1
    """Virtual replicas that each replica computes one after another in a step, which is gradient accumulation.
    Read where mesh.virtual_replicas is auto."""
    non_finite: Literal["halt", "skip"] = "halt"
    """On a non-finite loss or gradient: end with code 4, or leave the state alone and take the next batch."""
    max_consecutive_skips: PositiveInt = 10
    """More skipped steps than this in a row end the run with code 4."""
    ema_decay: Fraction = 0.0
    """Decay of the moving average of the parameters, which evaluation and export then use; 0: none."""
    frozen: Annotated[tuple[str, ...], FrozenList] = ()
    """Patterns such as 'blocks/0/*' (shell style, on 'a/b/c' paths); matching parameters are not trained."""
    args: Args = Field(default_factory=dict)
    """Keywords for an optimizer that is named by import path."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "Optimizer":
        def is_set(key: str) -> bool:
            return getattr(self, key) != type(self).model_fields[key].default

        problems = [
            f"{key}: {self.name} would ignore it, because it belongs to {', '.join(users)}; leave it out"
            for key, users in _USERS.items()
            if self.name not in users and is_set(key)
        ]
        if self.args and ":" not in self.name:
            problems.append(f"args: only an optimizer named by import path takes args, and {self.name} is none")
        if self.nesterov and self.momentum == 0 and self.name == "sgd":
            problems.append("nesterov: needs momentum > 0, and momentum is 0")
        if self.name == "onebit_adam" and is_set("clip_norm"):
            problems.append(
                "clip_norm: onebit_adam exchanges its momentum, so no gradient is left to clip; leave it out"
            )
        if self.schedule == "constant" and is_set("final_fraction"):
            problems.append('final_fraction: the schedule "constant" would ignore it; choose "linear" or "cosine"')
        _refuse(problems)
        return self


class Mesh(Settings):
    """The devices: nodes (slow link between them) x devices_per_node (fast link within)."""

    nodes: PositiveInt = 1
    """Size of the mesh axis 'node'."""
    devices_per_node: PositiveInt | Literal["auto"] = "auto"
    """Size of the mesh axis 'local'; auto: all there are, or 1 on the CPU."""
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """cpu emulates nodes * devices_per_node devices, shared out between the processes."""
    virtual_replicas: PositiveInt | Literal["auto"] = "auto"
    """Fixed slices of the global batch, each with its own randomness; auto: devices * accumulate_steps."""

    @property
    def num_devices(self) -> int | None:
        """Devices in the mesh, or None where only the machine can tell."""
        if self.devices_per_node != "auto":
            return self.nodes * self.devices_per_node
        return self.nodes if self.platform == "cpu" else None

    @model_validator(mode="after")
    def _is_no_larger_than_allowed(self) -> "Mesh":
        per_node = 1 if self.devices_per_node == "auto" else self.devices_per_node
        most = MOST_DEVICES[self.platform]
        if self.nodes * per_node > most:
            key = "nodes" if self.nodes >= per_node else "devices_per_node"
            _refuse([f'{key}: nodes * devices_per_node is at most {most} where platform is "{self.platform}"'])
        return self

    @model_validator(mode="after")
    def _every_device_has_whole_virtual_replicas(self) -> "Mesh":
        virtual, devices = self.virtual_replicas, self.num_devices
        if virtual != "auto" and devices and virtual % devices:
            nearest = _multiples(virtual, devices)
            _refuse([f"virtual_replicas: must be a multiple of the {devices} devices, such as {nearest}"])
        return self


class Sync(Settings):
    """The exchange of gradients."""

    algorithm: Literal["auto", AlgorithmName] = "auto"
    """How contributions are summed; central only to be measured against."""
    across: Literal["auto", AcrossName] = "auto"
    """How the hierarchical exchange goes across nodes."""
    bucket_mib: PositiveFloat | Literal["auto"] = "auto"
    """Gradients are exchanged together in buckets of about this size; "auto": 4, more for a ring and for tiny codes."""
    profile: str = ""
    """The measured links that auto chooses by and the banner predicts from: a file written by 'lockstep bench sync
    --profile', found from the current directory; empty: none."""
    codec: CodecName = "none"
    """How contributions are written on the wire; none: in float32."""
    compress: CompressName = "slow"
    """Where the codec is used: across nodes only, or everywhere."""
    error_feedback: bool = True
    """Whether what a codec dropped is added to the next contribution; read where there is a codec."""
    warmup_steps: NonNegativeInt = 0
    """Updates that are exchanged exactly before the codec is used; onebit_adam then freezes its variance."""
    momentum_correction: Fraction = 0.0
    """Momentum applied before the codec, in place of the optimizer's; it needs error_feedback."""
    args: Args = Field(default_factory=dict)
    """Keywords of the codec: rank, ratio, block_size, rounding."""
    mapping: Literal["shard_map", "pmap"] = "shard_map"
    """How the step is mapped over the devices: shard_map over the mesh, or pmap over one flat axis of all devices."""

    @model_validator(mode="after")
    def _across_is_read(self) -> "Sync":
        if self.across != "auto" and self.algorithm not in ("auto", "hierarchical"):
            _refuse([f'across: the algorithm "{self.algorithm}" would ignore it; it is for "hierarchical"'])
        return self

    @model_validator(mode="after")
    def _codec_is_read(self) -> "Sync":
        if self.codec == "none":
            of_codecs = ("compress", "error_feedback", "warmup_steps", "momentum_correction", "args")
            fresh = type(self).model_construct()
            is_set = [key for key in of_codecs if getattr(self, key) != getattr(fresh, key)]
            _refuse([f'{key}: the codec "none" would ignore it; choose a codec, or leave it out' for key in is_set])
            return self
        allowed = ("auto", *WITH_CODEC[self.compress])
        if self.algorithm not in allowed:
            names = ", ".join(f'"{name}"' for name in allowed)
            _refuse([f'algorithm: with a codec and compress = "{self.compress}" it is one of {names}'])
        if self.across != "auto" and self.compress == "all":
            _refuse(['across: compress = "all" would ignore it; leave it out'])
        if self.momentum_correction and not self.error_feedback:
            _refuse(["momentum_correction: it needs error_feedback = true"])
        return self


class Timeouts(Settings):
    """Limits, in seconds, which the agent enforces from outside: a worker past one ends the run with code 5.

    No two of them can contradict each other, for a worker that waits for another is allowed as long as that one is.
    """

    init_seconds: Timeout = 300.0
    """From a worker's start until all processes have met and their data are open."""
    compile_seconds: Timeout = 1800.0
    """For compiling the step and making the first state."""
    step_seconds: Timeout = 300.0
    """From one mark of a step (dispatched, completed) to the next."""
    data_seconds: Timeout = 300.0
    """For the next batch."""
    eval_seconds: Timeout = 1800.0
    """For an evaluation, with the compilation of its program."""
    checkpoint_seconds: Timeout = 600.0
    """For a save or a restore, as long as training waits for it."""
    shutdown_seconds: Timeout = 60.0
    """From the end of the work until a worker is gone."""
    grace_seconds: Timeout = 60.0
    """From SIGTERM, SIGINT, SIGHUP or SIGUSR1 until the state is saved and all have ended (code 75). Keep it below the
    time that the scheduler leaves before it kills."""


class Checkpoint(Settings):
    """What is saved, where and how often."""

    directory: str = ""
    """Where checkpoints go; empty: 'checkpoints' in the run directory. A relative path is one within that."""
    every_steps: NonNegativeInt = 0
    """Save every so many steps, and at the end; 0: only at the end."""
    keep: PositiveInt = 3
    """Newest checkpoints that are kept."""
    keep_best: NonNegativeInt = 0
    """Besides those, so many are kept whose last evaluation was the best."""
    best_metric: str = "loss"
    """The metric of the evaluation by which keep_best chooses."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a low or a high best_metric is good."""
    init_from: str = ""
    """A run directory or a checkpoint whose parameters, and nothing else, a new run starts from (--init-from)."""

    @model_validator(mode="after")
    def _best_is_read(self) -> "Checkpoint":
        given = [
            key for key in ("best_metric", "best_mode") if getattr(self, key) != type(self).model_fields[key].default
        ]
        if given and not self.keep_best:
            _refuse([f"{given[0]}: would be ignored, because keep_best is 0; set keep_best as well"])
        return self


class Observe(Settings):
    """What is written down on the way."""

    log_every_steps: PositiveInt = 10
    """A row in metrics.jsonl every so many steps."""


FaultKind = Literal["kill", "stop", "raise", "sleep", "spin", "delay", "nan"]
"""What can be staged; ``typing.get_args`` lists them."""
PhaseName = Literal["init", "compile", "data", "step", "checkpoint", "eval", "shutdown"]
"""What a worker can be busy with, in the order in which it happens; each has its limit in [timeouts]."""


class Fault(Settings):
    """A failure that is staged on purpose, to prove that it is caught. It strikes as its phase begins."""

    kind: FaultKind
    """kill (SIGKILL), stop (SIGSTOP), raise (an exception), sleep (alive, never joins), spin (busy in C, holding the
    interpreter lock), delay (late by ``seconds`` in every step from ``step`` on), nan (contributes NaN)."""
    rank: NonNegativeInt
    """The process in which it happens."""
    step: PositiveInt = 1
    """The step in or after which it happens (the first step is 1); the first time that there is such a phase."""
    phase: PhaseName = "step"
    """What it happens in."""
    seconds: NonNegativeFloat = 0.0
    """How long a delay is, or a sleep; 0: a sleep without end."""
    num_steps: PositiveInt = 1
    """For how many steps in a row, of nan."""
    attempt: NonNegativeInt = 1
    """The attempt in which it happens, so that a restarted run is spared; 0: in every one."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "Fault":
        problems: list[str] = []
        if self.kind == "nan" and self.phase != "step":
            problems.append('phase: a nan is in a contribution, so its phase is "step"')
        if self.kind != "nan" and self.num_steps != 1:
            problems.append(f"num_steps: {self.kind} would ignore it; it is for nan")
        if self.kind not in ("delay", "sleep") and self.seconds:
            problems.append(f"seconds: {self.kind} would ignore it; it is for delay and sleep")
        if self.kind == "delay" and not self.seconds:
            problems.append("seconds: a delay needs how many")
        if self.phase in ("init", "compile", "shutdown") and self.step != 1:
            problems.append(f'step: the phase "{self.phase}" would ignore it, for it comes once; leave it out')
        _refuse(problems)
        return self


class Debug(Settings):
    """Checks that cost time."""

    digest_every: NonNegativeInt = 0
    """Hash all parameters every so many steps and compare the replicas; 0: never."""
    log_example_ids: bool = False
    """Write the ids of each step's examples into metrics.jsonl."""
    faults: Annotated[tuple[Fault, ...], FrozenList] = ()
    """Failures to stage."""


def _problems_of_onebit_adam(sync: Sync) -> list[str]:
    """What does not go with the optimizer that exchanges its momentum."""
    if sync.codec == "none":
        return ['sync.codec: onebit_adam compresses its momentum; choose a codec, such as "sign"']
    problems: list[str] = []
    if sync.warmup_steps == 0:
        problems.append("sync.warmup_steps: onebit_adam freezes the variance learned in the warm-up; give 1 or more")
    if not sync.error_feedback:
        problems.append("sync.error_feedback: onebit_adam goes wrong without it; leave it out")
    if sync.momentum_correction:
        problems.append("sync.momentum_correction: onebit_adam exchanges its momentum already; leave it out")
    return problems


class Config(Settings):
    """The whole tree."""

    task: TaskSettings
    data: Data
    run: Run = Run()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    sync: Sync = Sync()
    timeouts: Timeouts = Timeouts()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _tables_agree(self) -> "Config":
        problems: list[str] = []
        steps, warmup, batch = self.run.num_steps, self.optimizer.warmup_steps, self.data.global_batch
        if self.optimizer.schedule != "constant" and warmup > steps:
            problems.append(
                f"optimizer.warmup_steps: the warm-up cannot be longer than run.num_steps = {steps}: set that to "
                f"{warmup} or more; only a run that has not started yet may shorten its warm-up instead"
            )
        virtual = self.mesh.virtual_replicas
        if virtual != "auto" and batch % virtual:
            nearest = _multiples(batch, virtual)
            problems.append(
                f"data.global_batch: must be a multiple of mesh.virtual_replicas = {virtual}, such as {nearest}"
            )
        if self.optimizer.name == "onebit_adam":
            problems += _problems_of_onebit_adam(self.sync)
        has_momentum = self.optimizer.momentum > 0 or (self.optimizer.name in _ADAM_LIKE and self.optimizer.beta1 > 0)
        if self.sync.momentum_correction and has_momentum and self.optimizer.name != "onebit_adam":
            problems.append(
                f"sync.momentum_correction: {self.optimizer.name} has a momentum of its own, and both would be "
                "applied; set that to 0, or leave this out"
            )
        problems += [
            f"debug.faults[{index}].step: never comes; the run ends after run.num_steps = {steps}"
            for index, fault in enumerate(self.debug.faults)
            if fault.step > steps
        ]
        _refuse(problems)
        return self
