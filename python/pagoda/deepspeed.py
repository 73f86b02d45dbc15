# SPDX-License-Identifier: Apache-2.0
"""Scripts written for DeepSpeed: `pagoda.initialize` takes their configuration and returns the
familiar four.

Every key of the sections below is honoured, or named in a warning that says what happens instead;
a key that is not known is an error. `_HONOURED` and `_INSTEAD` are the whole truth about it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from pagoda.engine import Engine
from pagoda.errors import UserError
from pagoda.schedules import make_schedule

_BY_ITSELF = "Pagoda decides by itself, from what it measures"
_BUDGET = "device_budget and host_budget are what bounds memory; name them to initialize()"
_STAGING = "staging memory is fixed: see staging, update_chunk and bucket in docs/config.md"
_NO_PARTS = "quantized and hierarchical communication do not exist here: full precision is sent"

# Keys that are read below.
_HONOURED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "seed", "communication_data_type",
    "optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params",
    "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window",
    "fp16.min_loss_scale", "bf16.enabled", "data_types.grad_accum_dtype",
    "zero_optimization.stage",
    "zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_params",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save", "dataloader_drop_last",
    "zero_optimization.reduce_bucket_size",
}

# Keys that are known and not read: what happens instead.
_INSTEAD = {
    "prescale_gradients": "gradients are added up in fp32, in the order of ranks, then divided",
    "gradient_predivide_factor": "gradients are added up in fp32, then divided by the ranks",
    "sparse_gradients": "gradients are dense",
    "zero_allow_untested_optimizer": "optimizers are adamw, adam, sgd and lion",
    "zero_force_ds_cpu_optimizer": "updates always run on the host",
    "steps_per_print": "nothing is printed; engine.stats() has the numbers",
    "wall_clock_breakdown": "engine.stats() and the configuration's trace have the times",
    "memory_breakdown": "engine.stats() has the bytes",
    "dump_state": "engine.stats() has the state",
    "disable_allgather": _BY_ITSELF,
    "fp16.auto_cast": "inputs are passed on as they are",
    "fp16.hysteresis": "the loss scale falls with the first overflow, as with hysteresis=1",
    "fp16.consecutive_hysteresis": "the loss scale falls with the first overflow",
    "fp16.fp16_master_weights_and_grads": "masters are fp32",
    "fp16.fused_mode": _BY_ITSELF,
    "bf16.check_grad_overflow": "gradients are taken as they are, as a plain loop takes them",
    "bf16.immediate_grad_update": "gradients are always taken as soon as they are there",
    "bf16.bf16_master_weights_and_grads": "masters are fp32; master='split' keeps them in 2 bytes",
    "bf16.bf16_optimizer_states": "say moments='bf16' to initialize()",
    "zero_optimization.allgather_partitions": _BY_ITSELF,
    "zero_optimization.allgather_bucket_size": _BY_ITSELF,
    "zero_optimization.overlap_comm": "communication always overlaps with computation",
    "zero_optimization.reduce_scatter": "from stage 2 on, each rank gets its shard only",
    "zero_optimization.contiguous_gradients": "gradients leave the device as they come",
    "zero_optimization.use_multi_rank_bucket_allreduce": _BY_ITSELF,
    "zero_optimization.load_from_fp32_weights": "there are no DeepSpeed checkpoints to load",
    "zero_optimization.elastic_checkpoint": "there are no DeepSpeed checkpoints",
    "zero_optimization.pipeline_loading_checkpoint": "there are no DeepSpeed checkpoints",
    "zero_optimization.sub_group_size": "updates stream in chunks of update_chunk bytes",
    "zero_optimization.round_robin_gradients": "every gradient is sharded over all ranks",
    "zero_optimization.grad_hooks": "gradients are taken by hooks",
    "zero_optimization.ignore_unused_parameters": "parameters without a gradient are left alone",
    "zero_optimization.legacy_stage1": "there is one stage 1",
    "zero_optimization.override_module_apply": "modules are not changed",
    "zero_optimization.memory_efficient_linear": "every operator is",
    "zero_optimization.enable_sanity_checks": "checks are always on",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache to be thrown away",
    "zero_optimization.leaf_module": "pages are parameters: no module is special",
    "zero_optimization.cpu_offload_use_pin_memory": "host memory of a GPU's pages is pinned",
    "zero_optimization.stage3_max_live_parameters": _BUDGET,
    "zero_optimization.max_live_parameters": _BUDGET,
    "zero_optimization.stage3_max_reuse_distance": "what is needed last goes first",
    "zero_optimization.max_reuse_distance": "what is needed last goes first",
    "zero_optimization.stage3_prefetch_bucket_size": _BY_ITSELF,
    "zero_optimization.prefetch_bucket_size": _BY_ITSELF,
    "zero_optimization.stage3_param_persistence_threshold": _BY_ITSELF,
    "zero_optimization.param_persistence_threshold": _BY_ITSELF,
    "zero_optimization.stage3_model_persistence_threshold": _BY_ITSELF,
    "zero_optimization.model_persistence_threshold": _BY_ITSELF,
    "zero_optimization.stage3_module_granularity_threshold": "pages are parameters",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _BY_ITSELF,
    "zero_optimization.module_granularity_threshold": "pages are parameters",
    "zero_optimization.use_all_reduce_for_fetch_params": _BY_ITSELF,
    "zero_optimization.stage3_allgather_sequential": _BY_ITSELF,
    "zero_optimization.allgather_sequential": _BY_ITSELF,
    "zero_optimization.stage3_partition_stream_chunk_size": "a parameter is made on the device",
    "zero_optimization.partition_stream_chunk_size": "a parameter is made on the device",
    "zero_optimization.zenflow": "every update is made in its step; updates begin during backward",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "there is no Muon",
    "zero_optimization.gather_16bit_weights_on_model_save": "engine.save_pretrained() always does",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save":
        "engine.save_pretrained() always does",
    "zero_optimization.zero_hpz_partition_size": _NO_PARTS,
    "zero_optimization.zero_quantized_weights": _NO_PARTS,
    "zero_optimization.zero_quantized_nontrainable_weights": _NO_PARTS,
    "zero_optimization.zero_quantized_gradients": _NO_PARTS,
    "zero_optimization.zeropp_loco_param": _NO_PARTS,
    "zero_optimization.mics_shard_size": _NO_PARTS,
    "zero_optimization.mics_hierarchical_params_gather": _NO_PARTS,
    "zero_optimization.offload_param.buffer_count": _STAGING,
    "zero_optimization.offload_param.buffer_size": _STAGING,
    "zero_optimization.offload_param.max_in_cpu": _BUDGET,
    "zero_optimization.offload_param.pin_memory": "host memory of a GPU's pages is pinned",
    "zero_optimization.offload_optimizer.buffer_count": _STAGING,
    "zero_optimization.offload_optimizer.pin_memory": "host memory of a GPU's pages is pinned",
    "zero_optimization.offload_optimizer.pipeline": "reading and writing always overlap",
    "zero_optimization.offload_optimizer.pipeline_read": "reading and writing always overlap",
    "zero_optimization.offload_optimizer.pipeline_write": "reading and writing always overlap",
    "zero_optimization.offload_optimizer.fast_init": "state is never written before its first use",
    "zero_optimization.offload_optimizer.ratio": _BUDGET,
    "zero_optimization.offload_optimizer.super_offload": "updates begin during backward",
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": "kernels take 16 bits as they come",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "say update_threads to initialize()",
    "aio.block_size": _BY_ITSELF,
    "aio.queue_depth": _BY_ITSELF,
    "aio.thread_count": "say fetch_threads to initialize()",
    "aio.intra_op_parallelism": "say fetch_threads to initialize()",
    "aio.single_submit": _BY_ITSELF,
    "aio.overlap_events": _BY_ITSELF,
    "aio.use_gds": "files go through host memory",
    "optimizer.legacy_fusion": "updates run on the host, in kernels of their own",
    "graph_harvesting": "there are no CUDA graphs",
    "vocabulary_size": "the model is taken as it is",
    "seq_parallel_comm_data_type": "there is no sequence parallelism",
    "activation_checkpointing": "use torch.utils.checkpoint, or engine.activations('host')",
    "flops_profiler": "there is none",
    "comms_logger": "engine.stats() counts what is sent",
    "tensorboard": "log what you like from engine.stats()",
    "wandb": "log what you like from engine.stats()",
    "csv_monitor": "log what you like from engine.stats()",
    "checkpoint": "there are no DeepSpeed checkpoints; engine.save_pretrained() writes the weights",
}

# Off, or as it would be anyway: no warning.
_NOTHING = (None, False, "auto", "none", 0, 0.0)

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw",
               "deepspeedcpuadam": "adamw", "sgd": "sgd", "lion": "lion", "fusedlion": "lion",
               "cpulion": "lion"}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its path; what is honoured or answered as a whole is not opened."""
    for key, value in tree.items():
        path = prefix + key
        if isinstance(value, dict) and path not in _HONOURED and path not in _INSTEAD:
            yield from _flat(value, path + ".")
        else:
            yield path, value


def _nearest(path: str) -> str:
    import difflib

    close = difflib.get_close_matches(path, [*_HONOURED, *_INSTEAD], 1)
    return f"; did you mean '{close[0]}'?" if close else ""


class Settings:
    """A DeepSpeed configuration, read: what is left of it is what was said."""

    def __init__(self, config: dict[str, Any] | str | Path) -> None:
        tree = dict(config if isinstance(config, dict) else json.loads(Path(config).read_text()))
        if "bfloat16" in tree:  # its name of once
            tree["bf16"] = {**tree.pop("bfloat16"), **tree.get("bf16", {})}
        if isinstance(tree.get("zero_optimization"), bool):  # likewise: stage 1, or none
            tree["zero_optimization"] = {"stage": int(tree["zero_optimization"])}
        self._values: dict[str, Any] = {}
        for path, value in _flat(tree):
            if path not in _HONOURED and path not in _INSTEAD:
                raise UserError(f"there is no key '{path}'{_nearest(path)}")
            if path in _INSTEAD and not (isinstance(value, (bool, int, float, str, type(None)))
                                         and value in _NOTHING):
                warnings.warn(f"'{path}' has no effect: {_INSTEAD[path]}", stacklevel=4)
            if value != "auto":
                self._values[path] = value

    def get(self, path: str, default: Any = None) -> Any:
        """The value, if it was said and is not "auto"."""
        return self._values.get(path, default)

    def section(self, path: str) -> dict[str, Any]:
        """A section that is passed on as a whole."""
        values = self._values.get(path) or {}
        return {key: value for key, value in values.items() if value != "auto"}

    def batches(self, ranks: int) -> tuple[int, int]:
        """Micro-batch size and micro-batches in a step, of which two of three may be said."""
        whole = self.get("train_batch_size")
        micro = self.get("train_micro_batch_size_per_gpu")
        steps = self.get("gradient_accumulation_steps")
        if micro is None:
            micro = (whole or ranks) // (ranks * (steps or 1))
        if steps is None:
            steps = 1 if whole is None else whole // (ranks * micro)
        if (whole is not None and whole != micro * steps * ranks) or micro < 1 or steps < 1:
            raise UserError(f"train_batch_size ({whole}) is not train_micro_batch_size_per_gpu "
                            f"({micro}) × gradient_accumulation_steps ({steps}) × ranks ({ranks})")
        return micro, steps

    def engine_keywords(self) -> dict[str, Any]:
        """What Engine() is told."""
        out: dict[str, Any] = {"zero": self.get("zero_optimization.stage", 0)}
        directories = []
        for state, section, old in (("parameters", "offload_param",
                                     ("cpu_offload_param", "cpu_offload_params")),
                                    ("optimizer", "offload_optimizer", ("cpu_offload",))):
            place = self.get(f"zero_optimization.{section}.device", "none")
            if any(self.get(f"zero_optimization.{name}") for name in old):
                place = "cpu"
            if place not in ("none", "cpu", "nvme"):
                raise UserError(f"zero_optimization.{section}.device is '{place}': it takes none, "
                                "cpu or nvme")
            if place == "nvme":
                directories.append(self.get(f"zero_optimization.{section}.nvme_path", "."))
            out[state] = {"none": "auto", "cpu": "host", "nvme": "nvme"}[place]
        if directories:
            out["nvme"] = sorted({str(path) for path in directories})
        if self.get("fp16.enabled"):
            fixed = self.get("fp16.loss_scale", 0)
            out["loss_scale"] = "dynamic" if fixed == 0 else str(fixed)
            out["loss_scale_initial"] = 2.0 ** self.get("fp16.initial_scale_power", 16)
            out["loss_scale_window"] = self.get("fp16.loss_scale_window", 1000)
            out["loss_scale_minimum"] = self.get("fp16.min_loss_scale", 1)
        if self.get("gradient_clipping"):
            out["clip"] = self.get("gradient_clipping")
        if self.get("data_types.grad_accum_dtype") == "fp32":
            out["gradient_dtype"] = "fp32"
        if (bucket := self.get("zero_optimization.reduce_bucket_size")) is not None:
            # Elements there, bytes here; a bucket beyond a few megabytes only costs memory.
            out["bucket"] = max(4096, min(int(bucket) * 2, 64 << 20))
        if self.get("seed") is not None:
            out["seed"] = self.get("seed")
        if self.get("communication_data_type") not in (None, "fp32"):
            warnings.warn("'communication_data_type' has no effect: gradients are sent in the type "
                          "of their parameter and added up in fp32", stacklevel=3)
        return out

    def optimizer_keywords(self) -> dict[str, Any]:
        """What attach() is told."""
        named = str(self.get("optimizer.type", "AdamW"))
        kind = _OPTIMIZERS.get(named.lower())
        if kind is None:
            raise UserError(f"optimizer.type '{named}' is none of Adam, AdamW, SGD and Lion")
        params = self.section("optimizer.params")
        if params.pop("max_grad_norm", None):
            raise UserError("optimizer.params.max_grad_norm: say gradient_clipping instead")
        if named.lower() == "adam" and not params.pop("adam_w_mode", True):
            kind = "adam"
        for key in ("torch_adam", "fused", "adamw_mode", "adam_w_mode", "set_grad_none",
                    "fp32_optimizer_states"):
            if params.pop(key, None) not in (None, False, True):
                raise UserError(f"optimizer.params.{key} is true or false")
        if not params.pop("bias_correction", True):
            warnings.warn("'optimizer.params.bias_correction' has no effect: moments are corrected",
                          stacklevel=3)
        if params.pop("amsgrad", False):
            raise UserError("optimizer.params.amsgrad: there is no AMSGrad")
        known = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"}
        for key in params:
            if key not in known:
                raise UserError(f"there is no key 'optimizer.params.{key}'")
        return {"optimizer": kind, **params}


class DeepSpeedEngine:
    """What `initialize` returns first: the model, called as ever, with backward() and step()."""

    def __init__(self, engine: Engine, module: torch.nn.Module, micro: int, accumulation: int,
                 scheduler: Any) -> None:
        self.engine = engine
        self.module = module
        self.optimizer = engine.optimizer
        self.lr_scheduler = scheduler
        self.micro_steps = 0
        self.global_steps = 0
        self._micro = micro
        self._accumulation = accumulation
        self._norm: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What it has not is the model's: parameters(), state_dict(), generate(), …"""
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def loss_scale(self) -> float:
        return self.engine.loss_scale

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro

    def train_batch_size(self) -> int:
        return self._micro * self._accumulation * self.engine.world_size

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, where something needed it."""
        return self._norm

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """One micro-batch; the loss is divided by their number."""
        self.engine.backward(loss / self._accumulation if self._accumulation > 1 else loss)
        return loss

    def step(self) -> None:
        """After every micro-batch: updates after the last of them."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        report = self.engine.step()
        self._norm = report.norm
        if report.skipped:
            return
        self.global_steps += 1
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def save_16bit_model(self, directory: str | Path, *_: Any) -> None:
        """The weights, as a Hugging Face directory."""
        self.engine.save_pretrained(directory)

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise UserError("there are no DeepSpeed checkpoints: save_16bit_model(directory) writes the "
                        "weights")

    load_checkpoint = save_checkpoint


def _ranks(group: distributed.ProcessGroup | None) -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(group)
    return int(os.environ.get("WORLD_SIZE", "1"))


def _loader(data: Any, micro: int, engine: Engine, collate: Any, drop_last: bool) -> Any:
    if data is None:
        return None
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

    sampler = (DistributedSampler(data, engine.world_size, engine.rank)
               if engine.world_size > 1 else RandomSampler(data))
    return DataLoader(data, batch_size=micro, sampler=sampler, collate_fn=collate,
                      drop_last=drop_last)


def initialize(args: Any = None, model: torch.nn.Module | Callable[[], torch.nn.Module] | None = None,
               optimizer: Any = None, model_parameters: Any = None, training_data: Any = None,
               lr_scheduler: Any = None, collate_fn: Any = None,
               config: dict[str, Any] | str | Path | None = None, **engine_keywords: Any,
               ) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """DeepSpeed's initialize(): the engine, its optimizer, the loader and the scheduler.

    `model` may also be a function that makes it: then its pages are born paged. Further keywords
    are `Engine`'s, and come before what the configuration says: `device_budget="6GiB"`.

    >>> import torch, pagoda
    >>> engine, optimizer, _, scheduler = pagoda.initialize(
    ...     model=torch.nn.Linear(2, 2), device="cpu", device_budget="1MiB",
    ...     config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
    ...             "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    >>> engine.backward(engine(torch.ones(1, 2)).sum()).shape
    torch.Size([])
    >>> engine.step()
    >>> engine.global_steps
    1
    """
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if model is None or config is None:
        raise UserError("initialize() needs a model and a config")
    if optimizer is not None and not callable(optimizer):
        raise UserError("an optimizer of your own cannot be paged: name it in the config's "
                        "optimizer section")
    settings = Settings(config)
    micro, accumulation = settings.batches(_ranks(engine_keywords.get("group")))
    engine = Engine(**{**settings.engine_keywords(), "accumulation": accumulation,
                       **engine_keywords})
    if not isinstance(model, torch.nn.Module):
        with engine.build():
            model = model()
    if settings.get("fp16.enabled"):
        model.half()
    if settings.get("bf16.enabled"):
        model.bfloat16()
    chosen = settings.optimizer_keywords()
    groups = None
    if model_parameters is not None:
        listed = list(model_parameters)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    facade = engine.attach(model, groups=groups, **chosen)
    if callable(lr_scheduler):
        schedule = lr_scheduler(facade)
    elif lr_scheduler is not None:
        schedule = lr_scheduler
    else:
        schedule = make_schedule(facade, settings.get("scheduler.type"),
                                 settings.section("scheduler.params"))
    wrapped = DeepSpeedEngine(engine, model, micro, accumulation, schedule)
    loader = _loader(training_data, micro, engine, collate_fn,
                     bool(settings.get("dataloader_drop_last")))
    return wrapped, facade, loader, schedule
