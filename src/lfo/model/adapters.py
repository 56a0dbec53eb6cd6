"""One frozen base with two LoRA adapters. Only this module switches adapters.

`couplings` defines which adapters exist, and which of them the policy and the world model use.

    model = DualAdapterModel.build(base, coupling="separate", seed=0)
    hidden_BTD = model.hidden(tokens_BT, model.policy_adapters)
    logits_BTV = model.logits(tokens_BT, model.world_model_adapters)

It maps token ids to hidden states and does not use losses, samples or text. Rows are padded on the right and need no
attention mask, because no token of a causal model sees later tokens.

It does not use `PeftModel.set_adapter`, which turns `requires_grad` off on every other adapter; also, gradient
checkpointing would recompute with the adapter that is active at backward. Here every adapter stays trainable, and
recomputation uses the adapters of its forward.

Shape suffixes: B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lfo.config import RunConfig
from lfo.config.couplings import POLICY, WORLD_MODEL, Coupling, coupling_of
from lfo.errors import ConfigError, DataError
from lfo.model.fast.lean import LeanForward
from lfo.model.fast.row_tree import RowTree
from lfo.model.lora_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    fitted,
    read_lora,
    read_scale,
    refuse_misfit,
    refuse_values_not_finite,
)

# Models that process the logits after the head; `head` alone would be wrong for them.
_LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraDelta:
    """The change that adapters make to one linear layer: `weight + scale * b @ a`; `a` is rank x in, `b` out x rank."""

    a: Tensor
    b: Tensor
    scale: float


class DualAdapterModel:
    """A causal language model with its adapters. Create it with `of_run` or `build`."""

    def __init__(self, peft_model: PeftModel, coupling: Coupling) -> None:
        self.peft_model = peft_model
        self.coupling = coupling
        self.policy_adapters, self.world_model_adapters = coupling.policy, coupling.world_model
        self.adapter_names = coupling.adapters
        self.gradient_checkpointing = False

        self._layers: dict[str, LoraLinear] = {
            name: module for name, module in peft_model.named_modules() if isinstance(module, LoraLinear)
        }
        if unsupported := [
            name
            for name, module in peft_model.named_modules()
            if isinstance(module, BaseTunerLayer) and name not in self._layers
        ]:
            raise ConfigError(f"LoRA targets must be linear layers, and {unsupported[0]} is not.")
        if isinstance(self.causal_lm.get_output_embeddings(), BaseTunerLayer):
            raise ConfigError("LoRA on the language-model head is not supported; leave it out of the targets.")

        peft_model.requires_grad_(False).eval()
        for name in self.adapter_names:
            for parameter in self.adapter_parameters(name):
                parameter.requires_grad_(True)
        self._switch(self.policy_adapters)

    @classmethod
    def of_run(cls, base: nn.Module, config: RunConfig, *, gradient_checkpointing: bool = False) -> DualAdapterModel:
        """Return the model of a run with initial adapters; `base` is modified in place."""
        return cls.build(
            base,
            coupling=config.coupling,
            seed=config.seed,
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            targets=config.lora.target_modules,
            gradient_checkpointing=gradient_checkpointing,
            with_world_model=config.has_world_model,
        )

    @classmethod
    def build(
        cls,
        base: nn.Module,
        *,
        coupling: str,
        seed: int,
        rank: int = 16,
        alpha: float = 32,
        targets: Literal["all-linear"] | Sequence[str] = "all-linear",
        gradient_checkpointing: bool = False,
        with_world_model: bool = True,
    ) -> DualAdapterModel:
        """Freeze `base` and add the adapters of the coupling, in fp32 for every dtype of the base.

        The initial weights of an adapter are a pure function of (seed, adapter, layer): the policy adapter is bit-equal
        with and without a world model, and no global random state is used.
        """
        row = coupling_of(coupling, with_world_model=with_world_model)
        if rank < 1:
            raise ConfigError(f"The LoRA rank must be at least 1, not {rank}.")
        for key, neutral in _LOGIT_TRANSFORMS.items():
            if getattr(cast(Any, base.config), key, neutral) not in (None, neutral):
                raise ConfigError(f"Models with {key} are not supported.")
        if getattr(cast(Any, base).get_output_embeddings(), "bias", None) is not None:
            raise ConfigError("Models whose output layer has a bias are not supported; choose a base without one.")

        target_modules = targets if isinstance(targets, str) else list(targets)
        config = LoraConfig(
            r=rank, lora_alpha=cast(Any, alpha), lora_dropout=0.0, target_modules=target_modules, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]):
            try:
                peft_model = cast(PeftModel, get_peft_model(cast(Any, base), config, adapter_name=POLICY))
            except ValueError as error:
                raise ConfigError(f"The LoRA targets {target_modules} do not fit this model: {error}") from error
            if WORLD_MODEL in row.adapters:
                resolved = cast(Any, peft_model.peft_config[POLICY]).target_modules
                peft_model.add_adapter(WORLD_MODEL, replace(config, target_modules=resolved))

        model = cls(peft_model, row)
        for name in model.adapter_names:
            model.reset_adapter(name, seed=seed)
        if gradient_checkpointing:
            model._enable_gradient_checkpointing()
        return model

    # ------------------------------------------------------------------ parts

    @property
    def causal_lm(self) -> Any:
        """The `...ForCausalLM` of the base, with LoRA layers."""
        return self.peft_model.get_base_model()

    @property
    def config(self) -> Any:
        return self.causal_lm.config

    @property
    def head(self) -> Tensor:
        """The weight of the head, V x D: `logits = hidden @ head.T`."""
        return self.causal_lm.get_output_embeddings().weight

    @property
    def device(self) -> torch.device:
        return self.head.device

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of one adapter, A and B of each layer in order."""
        self._check((name,))
        return [weight for layer in self._layers.values() for weight in _weights(layer, name)]

    @torch.no_grad()
    def reset_adapter(self, name: str, *, seed: int) -> None:
        """Reset an adapter to its initial weights: A uniform as in `nn.Linear`, B zero."""
        for layer_name, layer in self._layers.items():
            generator = torch.Generator().manual_seed(_stable_seed(seed, name, layer_name))
            a, b = _weights(layer, name)
            bound = 1.0 / math.sqrt(a.shape[1])
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
            b.zero_()

    # ------------------------------------------------------------------ switching

    def active(self, adapters: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which exactly `adapters` are active; `()` is the base.

        Contexts nest; leaving one restores the state before, also after an exception.
        """
        self._check(adapters)
        return self._activated(tuple(adapters))

    @contextmanager
    def _activated(self, adapters: tuple[str, ...]) -> Iterator[None]:
        before = self._active
        self._switch(adapters)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, adapters: tuple[str, ...]) -> None:
        for layer in self._layers.values():
            layer._active_adapter = list(adapters)  # peft's public setters also change requires_grad
        self._active = adapters

    def _check(self, adapters: Sequence[str]) -> None:
        if isinstance(adapters, str):
            raise TypeError(f"adapters must be a tuple of names, not the string {adapters!r}")
        if unknown := [name for name in adapters if name not in self.adapter_names]:
            raise KeyError(f"unknown adapter {unknown[0]!r}; this model has {', '.join(self.adapter_names)}")

    # ------------------------------------------------------------------ forward

    def hidden(
        self,
        tokens_BT: Tensor,
        adapters: Sequence[str],
        *,
        adapters_of_rows: Sequence[Sequence[str]] | None = None,
        tree: RowTree | None = None,
        wanted_BT: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm, B x T x D; losses compute logits only where they need them.

        Where `mixes_rows`, rows may have different adapters, `adapters_of_rows`; `adapters` are then all of them. With
        a `tree`, padding is not computed, and common prefixes of rows are computed once. Where `wanted_BT`, a mask on
        the host, is False, hidden states may be invalid.
        """
        if self._lean is not None:
            with self.active(adapters):
                rows = adapters_of_rows or [adapters] * len(tokens_BT)
                return self._lean(tokens_BT, rows, tree=tree, wanted_BT=wanted_BT)
        return self.hidden_of_modules(tokens_BT, adapters)

    def hidden_of_modules(self, tokens_BT: Tensor, adapters: Sequence[str]) -> Tensor:
        """Compute `hidden` with the modules of transformers and peft, for every architecture; the reference."""
        with self.active(adapters), self._checkpointing(), self._mixed_precision():
            return self.causal_lm.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state

    @property
    def mixes_rows(self) -> bool:
        """Whether rows with different adapters should run in one batch.

        This saves kernel launches on a GPU. On a CPU it would only compute more.
        """
        return self.device.type == "cuda" and self._lean is not None

    def logits(self, tokens_BT: Tensor, adapters: Sequence[str]) -> Tensor:
        return self.causal_lm.get_output_embeddings()(self.hidden(tokens_BT, adapters))

    @cached_property
    def _lean(self) -> LeanForward | None:
        """The same forward in fewer operations, if it supports this model; else None.

        Created at the first forward, because a base may be sharded after it got its adapters.
        """
        runs = not self.gradient_checkpointing and LeanForward.supports(self.causal_lm)
        return LeanForward(self.causal_lm) if runs else None

    @contextmanager
    def _mixed_precision(self) -> Iterator[None]:
        """Return a context in which a bf16 base and its fp32 adapters compute in bf16 on a GPU."""
        if self.device.type != "cuda" or self.head.dtype == torch.float32:
            yield
            return
        for layer in self._layers.values():
            layer.cast_input_dtype_enabled = False  # autocast decides the dtype; casting to fp32 first would be wasted
        try:
            with torch.autocast(self.device.type, dtype=self.head.dtype):
                yield
        finally:
            for layer in self._layers.values():
                layer.cast_input_dtype_enabled = True

    def _enable_gradient_checkpointing(self) -> None:
        def contexts() -> tuple[Any, Any]:
            return nullcontext(), self._activated(self._active)

        # Without dropout there is no random state to preserve.
        self.causal_lm.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False}
        )
        self.gradient_checkpointing = True

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Set only the layers to training mode, which checkpointing needs; modules below stay without dropout."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            yield
            return
        layers = [module for module in self.causal_lm.modules() if hasattr(module, "gradient_checkpointing")]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    # ------------------------------------------------------------------ weights out and in

    @torch.no_grad()
    def deltas(self, adapters: Sequence[str]) -> dict[str, LoraDelta]:
        """Return the LoRA of the one of `adapters`, if any, for each layer by its name in `causal_lm`."""
        self._check(adapters)
        deltas = {}
        for adapter in adapters:
            for name, layer in self._layers.items():
                a, b = _weights(layer, adapter)
                delta = LoraDelta(a=a.detach(), b=b.detach(), scale=layer.scaling[adapter])
                deltas[name.removeprefix("base_model.model.")] = delta
        return deltas

    def as_lora(self, adapter: str) -> tuple[dict[str, Tensor], LoraConfig]:
        """Return an adapter as an ordinary LoRA: its tensors with PEFT's names, and its config."""
        tensors = {}
        for name, delta in self.deltas((adapter,)).items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = delta.a
            tensors[f"base_model.model.{name}.lora_B.weight"] = delta.b
        config = cast(LoraConfig, self.peft_model.peft_config[adapter])
        return tensors, replace(config, inference_mode=True)

    def export(self, folder: Path | str, adapter: str) -> None:
        """Write an adapter as an ordinary PEFT folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, config = self.as_lora(adapter)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def save(self, directory: Path | str) -> None:
        """Write each adapter as a PEFT folder; a world model without its own adapter is written too."""
        folders = {name: name for name in self.adapter_names}
        for adapter in self.world_model_adapters:
            folders[WORLD_MODEL] = adapter
        for name, adapter in folders.items():
            self.export(Path(directory) / name, adapter)

    @torch.no_grad()
    def load(self, directory: Path | str) -> None:
        """Load what `save` wrote; nothing changes unless all files are valid."""
        loaded = {name: self._read(Path(directory) / name / WEIGHTS_FILE, name) for name in self.adapter_names}
        for name in loaded:
            self._refuse_other_scale(Path(directory) / name, name)
        for name, tensors in loaded.items():
            for parameter, tensor in zip(self.adapter_parameters(name), tensors, strict=True):
                parameter.copy_(tensor)

    def _refuse_other_scale(self, folder: Path, name: str) -> None:
        """Raise a `DataError` for an adapter of an older run with its own alpha: it would act at another scale here."""
        own: Any = self.peft_model.peft_config[name]
        saved = read_scale(folder)
        if not math.isclose(saved, own.lora_alpha / own.r):
            raise DataError(
                f"{folder} has the scale {saved:g} (lora_alpha / r), and this version loads adapters of scale "
                f"{own.lora_alpha / own.r:g} only"
            )

    @torch.no_grad()
    def load_policy(self, folder: Path | str) -> None:
        """Load any PEFT LoRA of this base into the policy; layers that it does not have keep their values."""
        lora = read_lora(folder)
        refuse_misfit(lora, {name: _weights(layer, POLICY) for name, layer in self._layers.items()})
        for name in lora.layers:
            a, b = _weights(self._layers[name], POLICY)
            new_a, new_b = fitted(lora, name, a, b, scale=self._layers[name].scaling[POLICY])
            a.copy_(new_a)
            b.copy_(new_b)

    def _read(self, path: Path, name: str) -> list[Tensor]:
        try:
            tensors = load_file(path)
        except FileNotFoundError as error:
            raise DataError(f"There is no adapter at {path}.") from error
        except (OSError, SafetensorError) as error:
            raise DataError(f"The adapter file {path} is damaged: {error}") from error
        keys = [f"{layer}.lora_{part}.weight" for layer in self._layers for part in "AB"]
        if set(keys) != set(tensors):
            raise DataError(f"The adapter file {path} was made for other layers than this model's.")
        ordered = [tensors[key] for key in keys]
        if any(p.shape != t.shape for p, t in zip(self.adapter_parameters(name), ordered, strict=True)):
            raise DataError(f"The adapter file {path} was made for another rank or model size.")
        refuse_values_not_finite(tensors, path)
        return ordered


def _weights(layer: LoraLinear, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of one adapter in one layer."""
    return cast(Any, layer.lora_A[adapter]).weight, cast(Any, layer.lora_B[adapter]).weight


def _stable_seed(*parts: object) -> int:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
