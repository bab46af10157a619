"""This module runs layers of the target in fewer operations during a verify.

It decides for which modules and in which thread this happens.

If kernels run (`ops.use_kernel`), the fast forms use them (`fast_by_kernels.py`). On a CPU (`ops.use_short_forwards`),
the fast forms use fewer operations of torch and fewer calls (`fast_on_cpu.py`). Tables name the classes that have such
a fast form (`layer_tables.py`). Before the first use, the fast form is compared with the class's own forward. A module
with a forward of its own runs unchanged. So does a module with hooks if its fast form would not call it.

During a verify, these modules have an attribute `forward`, which has an effect only in the verifying thread. Nothing
else of the model is changed. Hooks are called outside of `forward`, so taps work as usual.
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

# A forward of a module, which is bound to the module.
Forward = Callable[..., Any]


class _Running(NamedTuple):
    """An instance describes what a thread runs in fewer operations."""

    model: PreTrainedModel
    layers: dict[nn.Module, FastLayer]  # on a CPU, the layers that run as one function
    is_whole_run: bool  # whether this covers the prefill too, and only the run uses the model


_running = Current()


class Plan:
    """A plan holds the fast forms of a model's modules, as long as the modules and their code stay the same.

    Args:
        target (`Target`): The target.
        dtype (`torch.dtype`): The dtype of its weights. Fast forms are tried in this dtype.
        by_kernels (`bool`): Whether the fast forms use kernels. Otherwise they are the fast forms on a CPU.
    """

    def __init__(self, target: Target, dtype: torch.dtype, by_kernels: bool) -> None:
        self._facts = target.facts
        self._dtype = dtype
        self._by_kernels = by_kernels
        modules = target.parts.modules
        # This comes before the trials, so that code which is replaced during a trial is noticed at the next call.
        self._code = Code({type(module) for module in modules})
        # Modules are held weakly, because a plan is kept as long as its model and must not keep the model itself.
        self._forwards = list[tuple[weakref.ref[nn.Module], Forward]]()
        self._layers = list[tuple[weakref.ref[nn.Module], LayerForm]]()
        # Modules that torch.compile has traced must not be traced again.
        if any(module._compiled_call_impl is not None for module in modules):
            return
        if by_kernels:
            self._add_forms_by_kernels(target)
        else:
            self._add_forms_on_cpu(target.decoder)
            self._add_forms_on_cpu(target.head)

    def is_for(self, target: Target, dtype: torch.dtype, by_kernels: bool) -> bool:
        """Returns True if the plan is still valid for a target."""
        # The facts are a new object as soon as one of the modules is another object.
        has_same_modules = self._facts is target.facts
        has_same_forms = self._dtype == dtype and self._by_kernels == by_kernels
        return has_same_modules and has_same_forms and self._code.is_same()

    def prepared_layers(self, config: Any, is_unmodified: bool) -> dict[nn.Module, FastLayer]:
        """Returns the layers that run as one function in a run on a CPU, and the values that they
        use; see `prepare`.
        """
        found = dict[nn.Module, FastLayer]()
        angles = AnglesOfForward()
        for weak, form in self._layers:
            layer = weak()
            # A layer that was removed from the model may have been freed.
            if layer is None:
                continue
            prepared = prepare(layer, form, config, is_unmodified, angles)
            if prepared is not None:
                found[layer] = prepared
        return found

    def attach(self) -> None:
        """Sets the forwards of the modules. A forward of the user is kept."""
        for weak, forward in self._forwards:
            module = weak()
            # The forward is bound to the module, so that a copy of the module has its own.
            if module is not None and not has_own_forward(module):
                module.__dict__["forward"] = MethodType(forward, module)

    def detach(self) -> None:
        """Removes the forwards from the modules."""
        for weak, _ in self._forwards:
            module = weak()
            if module is None:
                continue
            # A forward that the user has set in the meantime is kept.
            is_ours = "forward" in module.__dict__ and not has_own_forward(module)
            if is_ours:
                del module.forward

    def _add_forms_by_kernels(self, target: Target) -> None:
        following = fast_by_kernels.following_norms(target, self._dtype)
        for module in target.decoder.modules():
            # With kernels, a layer and its parts each have a form of their own, because all of them are called.
            next_norm = following.get(module)
            fast = fast_by_kernels.fast_forward_of(module, self._dtype, next_norm)
            if fast is not None:
                self._put(module, _in_this_thread(fast))

    def _add_forms_on_cpu(self, module: nn.Module) -> None:
        """Adds the form of a module. If the module does not run as one function, the forms of its parts are added."""
        form = layer_form_of(module, self._dtype)
        if form is not None:
            self._layers.append((weakref.ref(module), form))
            self._put(module, _layer_forward)
            return
        fast = fast_on_cpu.fast_forward_of(module, self._dtype)
        if fast is not None:
            self._put(module, _in_this_thread(fast))
            return
        # Parts are tried if the whole module has no form. A norm in a layer of another class can still run in one
        # operation.
        for part in module.children():
            self._add_forms_on_cpu(part)

    def _put(self, module: nn.Module, forward: Forward) -> None:
        """Stores the forward that a module has during a verify."""
        self._forwards.append((weakref.ref(module), forward))


_plans: weakref.WeakKeyDictionary[PreTrainedModel, Plan] = weakref.WeakKeyDictionary()


@contextmanager
def fast_layers(target: Target, is_whole_run: bool = False) -> Generator[None]:
    """Runs the fast forms of the target's modules that have one, in this thread only.

    Within [`fast_whole_run`], this context does nothing.

    Args:
        target (`Target`): The target. Nothing happens unless its embedding is on a CPU or on a device where kernels
            run.
        is_whole_run (`bool`): Whether a call over Transformers' cache is a prefill of this package.
    """
    weight: Any = target.embedding.weight
    # The embedding's weight is checked for all weights. The fast forms check the tensors of each call themselves.
    by_kernels = ops.use_kernel(ops.rms_norm, weight)
    has_fast_forms = by_kernels or ops.use_short_forwards(weight)
    if in_whole_run(target) or not has_fast_forms:
        yield
        return
    plan = _plan_of(target, weight.dtype, by_kernels)
    # Hooks that run before the layers may change the layers' parts.
    hooks_of_model = target.model._forward_pre_hooks.values()
    hooks_of_decoder = target.decoder._forward_pre_hooks.values()
    stays_as_it_is = all(map(is_harmless, [*hooks_of_model, *hooks_of_decoder]))
    layers = dict[nn.Module, FastLayer]()
    if stays_as_it_is:
        # Only a whole run uses the fast form for prompts.
        config = target.config if is_whole_run else None
        layers = plan.prepared_layers(config, is_whole_run)
    forgetting: AbstractContextManager[None] = nullcontext()
    if by_kernels:
        # A forward may stop between a sum and its norm. States that were normed ahead must not stay for another run's
        # norm.
        forgetting = undoing(fast_by_kernels.forget_normed_ahead)
    with (
        forgetting,
        shared(plan, plan.attach, plan.detach),
        _running.doing(_Running(target.model, layers, is_whole_run)),
    ):
        yield


def fast_whole_run(target: Target) -> AbstractContextManager[None]:
    """Returns the context of [`fast_layers`] for a run from its prefill on, in which only its own forwards use the
    target.

    This is only for a CPU, because kernels are for a verify. It does nothing if the user's code runs within a forward.
    """
    weight: Any = target.embedding.weight
    # In the prefill, the fast layers run over Transformers' cache by SDPA. They support no other attention.
    has_fast_prompts = ops.use_short_forwards(weight) and by_sdpa(target.config)
    if has_fast_prompts and target.is_unmodified:
        return fast_layers(target, is_whole_run=True)
    return nullcontext()


def in_whole_run(target: Target) -> bool:
    """Returns True within [`fast_whole_run`], where no code of the user runs in the target."""
    scope = _running.scope
    if scope is None:
        return False
    running: _Running = scope[0]
    # Another model may run inside, such as another target in a callback.
    return running.is_whole_run and running.model is target.model


def _plan_of(target: Target, dtype: torch.dtype, by_kernels: bool) -> Plan:
    """Returns a model's plan. A new plan is made if modules were replaced, or the code of their classes."""
    plan = _plans.get(target.model)
    if plan is None or not plan.is_for(target, dtype, by_kernels):
        plan = Plan(target, dtype, by_kernels)
        _plans[target.model] = plan
    return plan


def _in_this_thread(fast: FastForward) -> Forward:
    """Returns a forward to bind to a module.

    It runs the fast form in a verifying thread, and elsewhere the class's forward.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = type(self).forward
        if _running.scope is None:
            return plain(self, *args, **kwargs)
        return fast(plain, self, *args, **kwargs)

    setattr(forward, MARK, True)
    return forward


def _layer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer as one function if this thread has prepared it, and otherwise its class's forward.

    It is bound to a layer.
    """
    scope = _running.scope
    if scope is not None:
        running: _Running = scope[0]
        layer = running.layers.get(self)
        # A layer that was changed before the run began is not in this dictionary.
        if layer is not None:
            out = layer.answer(self, args, kwargs)
            if out is not None:
                return out
    return type(self).forward(self, *args, **kwargs)


setattr(_layer_forward, MARK, True)
