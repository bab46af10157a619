"""Layers of the target in fewer operations while a verify runs: which modules, and in which thread.

Where kernels run (`ops.use_kernel`) by them (`fast_by_kernels.py`), on a CPU (`ops.use_short_forwards`) by fewer
operations of torch's own and fewer calls (`fast_on_cpu.py`). Which classes have such a fast form stands in tables
(`layer_tables.py`); it is compared with the class's own forward before its first use. A module that has a forward of
its own runs as it is, and so does one that would be passed by while hooks hang on it.

Nothing of the model is changed but for an attribute `forward` on these modules while a verify runs, which acts in the
verifying thread only. Hooks are called outside of `forward`, so taps fire as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_hf import ops
from dflash_hf.target_model import fast_by_kernels, fast_on_cpu
from dflash_hf.target_model.fast_on_cpu import (
    AnglesOfForward,
    FastForward,
    FastLayer,
    LayerForm,
    by_sdpa,
    layer_form_of,
    prepare,
)
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.user_code import MARK, Code, has_own_forward, is_harmless
from dflash_hf.undo import Current, shared, undoing

# A forward for a module, to be bound to it.
Forward = Callable[..., Any]


class _Running(NamedTuple):
    """What a thread runs in fewer operations."""

    model: PreTrainedModel
    layers: dict[nn.Module, FastLayer]  # on a CPU, the layers that run as one function
    is_whole_run: bool  # from the prefill on, and nothing but the run uses the model


_running = Current()


class Plan:
    """The fast forms of a model's modules, as long as these are the same and compute the same.

    Args:
        target (`Target`): The target.
        dtype (`torch.dtype`): Of its weights; fast forms are tried in it.
        by_kernels (`bool`): Whether they are those of the kernels, else those on a CPU.
    """

    def __init__(self, target: Target, dtype: torch.dtype, by_kernels: bool) -> None:
        self._facts = target.facts
        self._dtype = dtype
        self._by_kernels = by_kernels
        modules = target.parts.modules
        # Before the trials: what is replaced meanwhile is noticed at the next call.
        self._code = Code({type(module) for module in modules})
        # Modules are held weakly: the plan of a model is kept as long as the model, and must not keep it.
        self._forwards = list[tuple[weakref.ref[nn.Module], Forward]]()
        self._layers = list[tuple[weakref.ref[nn.Module], LayerForm]]()
        # What torch.compile has traced is not to be traced again.
        if any(module._compiled_call_impl is not None for module in modules):
            return
        if by_kernels:
            self._add_forms_by_kernels(target)
        else:
            self._add_forms_on_cpu(target.decoder)
            self._add_forms_on_cpu(target.head)

    def is_for(self, target: Target, dtype: torch.dtype, by_kernels: bool) -> bool:
        """Returns True if it still holds for a target."""
        # The facts are another object as soon as one of the modules is another one.
        has_same_modules = self._facts is target.facts
        has_same_forms = self._dtype == dtype and self._by_kernels == by_kernels
        return has_same_modules and has_same_forms and self._code.is_same()

    def prepared_layers(self, config: Any, is_unmodified: bool) -> dict[nn.Module, FastLayer]:
        """Returns the layers that run as one function in a run on a CPU, and what they compute with; see `prepare`."""
        found = dict[nn.Module, FastLayer]()
        angles = AnglesOfForward()
        for weak, form in self._layers:
            layer = weak()
            # A layer that was taken out of the model may be gone already.
            if layer is None:
                continue
            prepared = prepare(layer, form, config, is_unmodified, angles)
            if prepared is not None:
                found[layer] = prepared
        return found

    def attach(self) -> None:
        """Puts the forwards on their modules; a forward of the user's stays."""
        for weak, forward in self._forwards:
            module = weak()
            # Bound, so that a copy of the module has its own.
            if module is not None and not has_own_forward(module):
                module.__dict__["forward"] = MethodType(forward, module)

    def detach(self) -> None:
        """Takes the forwards away again."""
        for weak, _ in self._forwards:
            module = weak()
            if module is None:
                continue
            # A forward that the user has put there meanwhile stays.
            is_ours = "forward" in module.__dict__ and not has_own_forward(module)
            if is_ours:
                del module.forward

    def _add_forms_by_kernels(self, target: Target) -> None:
        following = fast_by_kernels.following_norms(target, self._dtype)
        for module in target.decoder.modules():
            # Every module has a form of its own here, a layer as well as its parts: all of them are called.
            next_norm = following.get(module)
            fast = fast_by_kernels.fast_forward_of(module, self._dtype, next_norm)
            if fast is not None:
                self._put(module, _in_this_thread(fast))

    def _add_forms_on_cpu(self, module: nn.Module) -> None:
        """Adds the forms of a module and, unless it runs as one function, of its parts."""
        form = layer_form_of(module, self._dtype)
        if form is not None:
            self._layers.append((weakref.ref(module), form))
            self._put(module, _layer_forward)
            return
        fast = fast_on_cpu.fast_forward_of(module, self._dtype)
        if fast is not None:
            self._put(module, _in_this_thread(fast))
            return
        # Parts are tried where the whole has no form: a norm in a layer of another class still runs in one operation.
        for part in module.children():
            self._add_forms_on_cpu(part)

    def _put(self, module: nn.Module, forward: Forward) -> None:
        """Notes the forward that a module is to have while a verify runs."""
        self._forwards.append((weakref.ref(module), forward))


_plans: weakref.WeakKeyDictionary[PreTrainedModel, Plan] = weakref.WeakKeyDictionary()


@contextmanager
def fast_layers(target: Target, is_whole_run: bool = False) -> Generator[None]:
    """Runs modules of the target's decoder that have a fast form by it, in this thread only.

    Within a whole run, [`fast_whole_run`], nothing is looked up again.

    Args:
        target (`Target`): The target; nothing happens unless its embedding is on a CPU or where kernels run.
        is_whole_run (`bool`): Whether what is called over Transformers' cache is a prefill of ours.
    """
    weight: Any = target.embedding.weight
    # The embedding's weight stands for all others: the forms ask again for the tensors of each call.
    by_kernels = ops.use_kernel(ops.rms_norm, weight)
    has_fast_forms = by_kernels or ops.use_short_forwards(weight)
    if in_whole_run(target) or not has_fast_forms:
        yield
        return
    plan = _plan_of(target, weight.dtype, by_kernels)
    # What runs before the layers may change what they are made of.
    hooks_of_model = target.model._forward_pre_hooks.values()
    hooks_of_decoder = target.decoder._forward_pre_hooks.values()
    stays_as_it_is = all(map(is_harmless, [*hooks_of_model, *hooks_of_decoder]))
    layers = dict[nn.Module, FastLayer]()
    if stays_as_it_is:
        # Only a whole run has prompts that go by the fast form.
        config = target.config if is_whole_run else None
        layers = plan.prepared_layers(config, is_whole_run)
    forgetting: AbstractContextManager[None] = nullcontext()
    if by_kernels:
        # A forward may stop between a sum and its norm: what was normed ahead must not wait for another run's norm.
        forgetting = undoing(fast_by_kernels.forget_normed_ahead)
    with (
        forgetting,
        shared(plan, plan.attach, plan.detach),
        _running.doing(_Running(target.model, layers, is_whole_run)),
    ):
        yield


def fast_whole_run(target: Target) -> AbstractContextManager[None]:
    """[`fast_layers`] of a run from its prefill on, in which nothing but its forwards uses the target.

    On a CPU only: kernels are for a verify. Not where code of the user's runs within a forward.
    """
    weight: Any = target.embedding.weight
    # In the prefill the layers go over Transformers' cache by SDPA, and under no other attention.
    has_fast_prompts = ops.use_short_forwards(weight) and by_sdpa(target.config)
    if has_fast_prompts and target.is_unmodified:
        return fast_layers(target, is_whole_run=True)
    return nullcontext()


def in_whole_run(target: Target) -> bool:
    """Returns True within [`fast_whole_run`]: no code of the user's runs in the target."""
    scope = _running.scope
    if scope is None:
        return False
    running: _Running = scope[0]
    # Another model may run inside: a target of its own, in a callback.
    return running.is_whole_run and running.model is target.model


def _plan_of(target: Target, dtype: torch.dtype, by_kernels: bool) -> Plan:
    """Returns a model's plan; a new one when modules were replaced, or what their classes compute."""
    plan = _plans.get(target.model)
    if plan is None or not plan.is_for(target, dtype, by_kernels):
        plan = Plan(target, dtype, by_kernels)
        _plans[target.model] = plan
    return plan


def _in_this_thread(fast: FastForward) -> Forward:
    """Returns a forward for a module, to be bound: the fast one in a verifying thread, elsewhere its class's."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = type(self).forward
        if _running.scope is None:
            return plain(self, *args, **kwargs)
        return fast(plain, self, *args, **kwargs)

    setattr(forward, MARK, True)
    return forward


def _layer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward for a layer, to be bound: as one function where this thread has prepared it, elsewhere its class's."""
    scope = _running.scope
    if scope is not None:
        running: _Running = scope[0]
        layer = running.layers.get(self)
        # A layer that was found changed at the run's beginning is not among them.
        if layer is not None:
            out = layer.answer(self, args, kwargs)
            if out is not None:
                return out
    return type(self).forward(self, *args, **kwargs)


setattr(_layer_forward, MARK, True)
