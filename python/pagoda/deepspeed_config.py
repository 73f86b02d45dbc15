# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration, key by key.

Every key of the sections below is honoured, or named in one warning that says what happens instead;
a key that is not known is an error, and so is an "auto" that nothing resolves (auto_values.py).
`_HONOURED` and `_INSTEAD` are the whole truth about it.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagoda.errors import UserError
from pagoda.optimizer import group_defaults

_BY_ITSELF = "Pagoda decides by itself, from what it measures"
_BUDGET = "device_budget and host_budget bound memory; pass them to initialize()"
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
    "prescale_gradients": "gradients are summed in fp32, in the order of ranks, then divided",
    "gradient_predivide_factor": "gradients are summed in fp32, then divided by the number of ranks",
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
    "bf16.bf16_optimizer_states": "pass moments='bf16' to initialize()",
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
    "zero_optimization.stage3_max_reuse_distance": "the page that is needed last is evicted first",
    "zero_optimization.max_reuse_distance": "the page that is needed last is evicted first",
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
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "pass update_threads to initialize()",
    "aio.block_size": _BY_ITSELF,
    "aio.queue_depth": _BY_ITSELF,
    "aio.thread_count": "pass fetch_threads to initialize()",
    "aio.intra_op_parallelism": "pass fetch_threads to initialize()",
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
    "tensorboard": "log from engine.stats()",
    "wandb": "log from engine.stats()",
    "csv_monitor": "log from engine.stats()",
    "checkpoint": "there are no DeepSpeed checkpoints; engine.save_pretrained() writes the weights",
}

# Keys whose values are passed on as a whole.
_SECTIONS = ("optimizer.params", "scheduler.params")

# Where nothing is known, "auto" is what Pagoda does by itself, and changes no result; a batch size
# follows from the two others.
_AUTO_IS_OURS = {"train_batch_size", "communication_data_type", "zero_optimization.reduce_bucket_size",
                 "zero_optimization.stage3_gather_16bit_weights_on_model_save"}

# Off, or as it would be anyway: no warning.
_NOTHING = (None, False, "auto", "none", 0, 0.0)

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw",
               "deepspeedcpuadam": "adamw", "sgd": "sgd", "lion": "lion", "fusedlion": "lion",
               "cpulion": "lion"}


# What a constant of an optimizer is called elsewhere.
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "decay": "weight_decay"}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its path; what is honoured or answered as a whole is not opened."""
    for key, value in tree.items():
        path = prefix + key
        if isinstance(value, dict) and path not in _HONOURED and path not in _INSTEAD:
            yield from _flat(value, path + ".")
        else:
            yield path, value


def _nearest(path: str) -> str:
    close = difflib.get_close_matches(path, [*_HONOURED, *_INSTEAD], 1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _read(config: Any) -> dict[str, Any]:
    """The configuration as a tree of dicts that may be changed."""
    config = getattr(config, "config", config)  # of transformers' own class for it
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"the configuration '{config}' cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError("a DeepSpeed configuration must be a dict or the path of a JSON file, got "
                        f"{type(config).__name__}")
    tree = dict(config)
    if isinstance(tree.get("bfloat16"), dict):  # its name of once
        tree["bf16"] = {**tree.pop("bfloat16"), **tree.get("bf16", {})}
    if isinstance(tree.get("zero_optimization"), bool):  # likewise: stage 1, or none
        tree["zero_optimization"] = {"stage": int(tree["zero_optimization"])}
    return tree


def _require_no_amp(section: Any) -> None:
    """Apex casts operators by lists of its own, which nothing here does. "auto" is off, as without."""
    enabled = section.get("enabled") if isinstance(section, dict) else section
    if enabled not in (None, False, "auto"):
        raise UserError("amp.enabled is true, and Apex's mixed precision is not supported: set "
                        "bf16.enabled or fp16.enabled instead")


class Settings:
    """A DeepSpeed configuration, read: what is left of it is what was said.

    `ignored` has the keys that have no effect, or are missing, and what happens instead.
    """

    def __init__(self, config: Any) -> None:
        self.ignored: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._auto: list[str] = []
        tree = _read(config)
        _require_no_amp(tree.pop("amp", None))
        for path, value in _flat(tree):
            if path not in _HONOURED and path not in _INSTEAD:
                raise UserError(f"there is no key '{path}'{_nearest(path)}")
            if path in _INSTEAD:
                if not (isinstance(value, (bool, int, float, str, type(None)))
                        and value in _NOTHING):
                    self.ignored[path] = _INSTEAD[path]
            elif path in _SECTIONS:
                self._set_section(path, value)
            elif value == "auto":
                self._auto.append(path)
            else:
                self._values[path] = value

    def _set_section(self, path: str, values: Any) -> None:
        if values is None:
            return
        if values == "auto":
            self._auto.append(path)
            return
        if not isinstance(values, dict):
            raise UserError(f"{path} = {values!r} is not allowed: expected keys and values")
        self._auto += [f"{path}.{key}" for key, value in values.items() if value == "auto"]
        self._values[path] = {key: value for key, value in values.items() if value != "auto"}

    def _said(self, path: str) -> Any:
        section, _, key = path.rpartition(".")
        said = self._values.get(section, {}).get(key) if section in _SECTIONS else self.get(path)
        return list(said) if isinstance(said, tuple) else said

    def _set(self, path: str, value: Any) -> None:
        section, _, key = path.rpartition(".")
        if section in _SECTIONS:
            self._values[section][key] = value
        else:
            self._values[path] = value

    def resolve(self, arguments: dict[str, Any], model: dict[str, Any]) -> None:
        """Puts what TrainingArguments (if there are any) and the model say where the configuration
        says "auto". UserError for what nobody knows, and where they contradict each other."""
        differing = [f"{path} ({said}, and the arguments say {value})"
                     for path, value in arguments.items()
                     if (said := self._said(path)) is not None and said != value]
        if differing:
            raise UserError(f"the configuration and the TrainingArguments differ: "
                            f"{', '.join(differing)}; \"auto\" takes what the arguments say")
        if arguments and not self.get("optimizer.type"):
            self._values["optimizer.params"] = {
                key.rpartition(".")[2]: value for key, value in arguments.items()
                if key.startswith("optimizer.params.")}
        known = {**model, **arguments, "scheduler.params.warmup_min_lr": 0}
        for path in ("fp16.enabled", "bf16.enabled"):
            if path in arguments and path in model:
                known[path] = arguments[path] or model[path]
        if (rate := self._said("optimizer.params.lr")) is not None:
            known.setdefault("scheduler.params.warmup_max_lr", rate)
        missing = []
        for path in self._auto:
            if path in known:
                self._set(path, known[path])
            elif path not in _AUTO_IS_OURS:
                missing.append(path)
        if not self.get("fp16.enabled"):
            missing = [path for path in missing if not path.startswith("fp16.")
                       or path == "fp16.enabled"]
        if missing:
            raise UserError(f"\"auto\" cannot be resolved for {', '.join(missing)}: fill them in, or "
                            + ("set max_steps in Trainer's arguments or pass "
                               "initialize(training_data=…), for they depend on the number of steps"
                               if arguments and all("_num_steps" in path for path in missing) else
                               "pass Trainer's arguments as initialize(args=…)"))

    def get(self, path: str, default: Any = None) -> Any:
        """The value, if it was said and is not "auto"."""
        value = self._values.get(path)
        return default if value is None else value

    def number(self, path: str, default: float) -> float:
        """A value that is a number."""
        value = self.get(path, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{path} = {value!r} is not allowed: expected a number")
        return value

    def section(self, path: str) -> dict[str, Any]:
        """A section that is passed on as a whole."""
        return dict(self._values.get(path) or {})

    def _count(self, path: str) -> int | None:
        value = self.get(path)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{path} = {value!r} is not allowed: expected an integer ≥ 1")
        return value

    def batches(self, ranks: int) -> tuple[int, int]:
        """Micro-batch size and micro-batches in a step, of which two of three may be said."""
        whole = self._count("train_batch_size")
        micro = self._count("train_micro_batch_size_per_gpu")
        steps = self._count("gradient_accumulation_steps")
        if micro is None:
            micro = (whole or ranks) // (ranks * (steps or 1))
        if steps is None:
            steps = 1 if whole is None else whole // (ranks * max(1, micro))
        if (whole is not None and whole != micro * steps * ranks) or micro < 1 or steps < 1:
            raise UserError(f"train_batch_size ({whole}) is not train_micro_batch_size_per_gpu "
                            f"({micro}) × gradient_accumulation_steps ({steps}) × ranks ({ranks}): "
                            f"expected {max(1, micro) * max(1, steps) * ranks}")
        return micro, steps

    def _stage(self) -> int:
        stage = self.get("zero_optimization.stage", 0)
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
            raise UserError(f"zero_optimization.stage = {stage!r} is not allowed: "
                            "expected an integer from 0 to 3")
        return stage

    def engine_keywords(self, nvme: object = None) -> dict[str, Any]:
        """What Engine() is told. `nvme`: the directories that initialize() was given, if any."""
        out: dict[str, Any] = {"zero": self._stage()}
        directories = []
        for state, section, old in (("parameters", "offload_param",
                                     ("cpu_offload_param", "cpu_offload_params")),
                                    ("optimizer_state", "offload_optimizer", ("cpu_offload",))):
            place = self.get(f"zero_optimization.{section}.device", "none")
            if any(self.get(f"zero_optimization.{name}") for name in old):
                place = "cpu"
            if place not in ("none", "cpu", "nvme"):
                raise UserError(f"zero_optimization.{section}.device is '{place}': "
                                "expected none, cpu or nvme")
            path = self.get(f"zero_optimization.{section}.nvme_path")
            if place == "nvme" and path is not None:
                directories.append(path)
            elif place == "nvme" and not nvme:  # the current directory would be a guess
                raise UserError(f"zero_optimization.{section}.device is 'nvme' and zero_optimization."
                                f"{section}.nvme_path is not set: set it to a directory, or pass "
                                "nvme=[…] to initialize()")
            out[state] = {"none": "auto", "cpu": "host", "nvme": "nvme"}[place]
        if directories:
            out["nvme"] = sorted({str(path) for path in directories})
        if self.get("fp16.enabled") and self.get("bf16.enabled"):
            raise UserError("fp16.enabled and bf16.enabled are both true: a model is one of them")
        if self.get("fp16.enabled"):
            fixed = self.number("fp16.loss_scale", 0)
            out["loss_scale"] = "dynamic" if fixed == 0 else str(fixed)
            out["loss_scale_initial"] = 2.0 ** self.number("fp16.initial_scale_power", 16)
            out["loss_scale_window"] = self.number("fp16.loss_scale_window", 1000)
            out["loss_scale_minimum"] = self.number("fp16.min_loss_scale", 1)
        if self.get("gradient_clipping"):
            out["clip"] = self.number("gradient_clipping", 0)
        if self.get("data_types.grad_accum_dtype") == "fp32":
            out["gradient_dtype"] = "fp32"
        if bucket := self.number("zero_optimization.reduce_bucket_size", 0):
            # Elements there, bytes here; a bucket beyond a few megabytes only costs memory.
            out["bucket"] = max(4096, min(int(bucket) * 2, 64 << 20))
        if self.get("seed") is not None:
            out["seed"] = self.get("seed")
        if self.get("communication_data_type") not in (None, "fp32"):
            self.ignored["communication_data_type"] = (
                "gradients are sent in the dtype of their parameter and summed in fp32")
        return out

    def optimizer_keywords(self) -> dict[str, Any]:
        """What attach() is told."""
        chosen = True
        if self.get("optimizer.type") is None and not self.section("optimizer.params"):
            ours = group_defaults("adamw")
            chosen = False
            self.ignored["optimizer"] = (
                f"missing; AdamW with lr={ours['lr']:g} and weight_decay={ours['weight_decay']:g} is used: "
                "set optimizer.type and optimizer.params.lr to choose")
        named = str(self.get("optimizer.type", "AdamW"))
        kind = _OPTIMIZERS.get(named.lower())
        if kind is None:
            raise UserError(f"optimizer.type '{named}' is not supported; use one of Adam, AdamW, SGD, Lion")
        params = self.section("optimizer.params")
        if params.pop("max_grad_norm", None):
            raise UserError("optimizer.params.max_grad_norm: use gradient_clipping instead")
        if named.lower() == "adam" and not params.pop("adam_w_mode", True):
            kind = "adam"
        if chosen and kind != "sgd" and not params.get("torch_adam", False):
            params.setdefault("weight_decay", 0.0)  # of DeepSpeed's own; torch.optim.AdamW has 0.01
        for key in ("torch_adam", "fused", "adamw_mode", "adam_w_mode", "set_grad_none",
                    "fp32_optimizer_states"):
            if params.pop(key, None) not in (None, False, True):
                raise UserError(f"optimizer.params.{key}: expected true or false")
        if not params.pop("bias_correction", True):
            self.ignored["optimizer.params.bias_correction"] = "moments are corrected"
        if params.pop("amsgrad", False):
            raise UserError("optimizer.params.amsgrad: AMSGrad is not supported")
        known = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"}
        for key in params:
            if key not in known:
                near = _OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(key, known, 1)), None)
                raise UserError(f"there is no key 'optimizer.params.{key}'" + (
                    f"; did you mean 'optimizer.params.{near}'?" if near else
                    f"; it has {', '.join(sorted(known))}"))
        return {"optimizer": kind, **params}
