r"""
# Module injection: the same model with other forwards

`inject` gives the modules of a model a better forward, chosen by policies, and `restore` takes it
back.

A module that was replaced by another one would lose its parameters, names in checkpoints, hooks,
and references in other modules. So we leave each module object where it is, and change its class:

| | the plain module | injected | restored |
|---|---|---|---|
| class | `LlamaRMSNorm` | `rms_norm(LlamaRMSNorm)` | `LlamaRMSNorm` |
| made of | | `RMSNorm`, `LlamaRMSNorm` | |
| forward | written out | that of `RMSNorm` | written out |
| its signature | `(hidden_states)` | the same | the same |
| parameters | `weight` | the same object, the same name | the same object |

The new class is a subclass of the old one, so `isinstance` says the same as before, and `wrap`
finds its layers by their classes. Every checkpoint keeps its format.

**A policy** is a name, the classes that it replaces, and the class that has the new forward, its
*replacement*. If a single module does not fit, `inject` raises an error before anything changes:

| module | policy `attention` | because |
|---|---|---|
| `MultiHeadAttention`, without dropout | replaces it | |
| a subclass of it with another `get_scores` | refuses it | the new forward would not call that |

With several policies for one class, the later ones go around the earlier ones. For the policies
$p_1, p_2$ and the class $c$ the new class is

$$\text{class} = p_2\big(p_1(c)\big)$$

and `restore` takes off the last one first.

    model = inject(model, [policies.attention(), policies.rms_norm()])
    model = wrap(model, Block)
    ...
    restore(model.destroy())

**Run this**: `python -m pytest tests/inject/test_inject.py`.

**Not covered, and what that costs**: inject before `wrap`; afterwards it is an error. A module's
new class exists in this process only, so an injected model cannot be pickled. A compiled forward
is not recompiled.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from zero3.guards.checks import expect, is_sharded


class Replacement(nn.Module):
    """
    ## What a module of another class gets: a forward, and a mapping of its weights

    Its `forward` gets the arguments of the old one, and finds the module as it was.
    """

    # Whether the model would compute something else if a module that does not fit were left as it
    # is. Such a replacement goes around the others, and none can be added later.
    all_or_none = False

    @classmethod
    def problem(cls, module: nn.Module) -> str:
        """
        ### Why a module does not fit, or an empty string

        * `module` still has its own class. The options of the policy are attributes of `cls`
        """
        return ""

    def begin(self) -> None:
        """
        ### Map the weights to those of the new forward; called once, by `inject`
        """

    def end(self) -> None:
        """
        ### Map the weights back; called once, by `restore`
        """


class Policy(NamedTuple):
    """
    ## Which classes get which replacement

    * `replaces` has classes, or their full names by `torch.typename`, so that no library has to be
      imported for it. Each comes with the options for modules of this class: attributes of the new
      class
    """

    name: str
    by: type[Replacement]
    replaces: Mapping[str | type, Mapping[str, Any]]
    # Called before anything changes, with the model, and the new classes by their modules.
    prepare: Callable[[nn.Module, dict[nn.Module, type]], None] | None = None

    def base_of(self, kind: type) -> type | None:
        """
        ### The class that a module's class is or inherits from, of those that this policy replaces
        """
        return next((base for base in kind.__mro__
                     if base in self.replaces or torch.typename(base) in self.replaces), None)

    def new_class(self, kind: type[nn.Module]) -> type[Replacement]:
        """
        ### The class of a replaced module: the methods of the replacement, in front of its own
        """
        base: Any = self.base_of(kind)
        options = self.replaces[base if base in self.replaces else torch.typename(base)]

        # With the signature of its own, which a model's `generate` and trainers ask for.
        @functools.wraps(kind.forward)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.by.forward(module, *args, **kwargs)

        return cast(type[Replacement], type(
            f"{self.name}({kind.__name__})",
            (self.by, kind),
            {**options, "forward": forward}))


class Finding(NamedTuple):
    """
    ## One line of a report
    """

    path: str  # the module's name in the model
    kind: str  # the name of its class
    policy: str
    problem: str  # why it is not replaced, or an empty string

    def __str__(self) -> str:
        return (f"`{self.path}` ({self.kind}) not by {self.policy}: {self.problem}" if self.problem
                else f"`{self.path}` ({self.kind}) by {self.policy}")


def inject(model: nn.Module,
           policies: Iterable[Policy],
           strict: bool = True) -> nn.Module:
    """
    ## Replace modules of a model, in place

    Call it before `wrap`. The model may be on the meta device.

    * `policies` are applied one after the other, `tensor_parallel` last
    * `strict=False` leaves modules as they are if a policy does not fit them; `report` lists them

    Returns the model. Raises `ValueError` if a policy finds no module of its classes, or one that
    does not fit, or comes twice, and `RuntimeError` if the model is sharded already. The model is
    unchanged then. Raises `RuntimeError` too if a layer that `tensor_parallel` splits has another
    policy; build the model anew then.
    """
    policies = sorted(policies, key=lambda policy: policy.by.all_or_none)
    lines = report(model, policies)
    _check(model, policies, lines, strict)
    modules = {policy.name: [model.get_submodule(line.path) for line in lines
                             if line.policy == policy.name and not line.problem]
               for policy in policies}
    for policy in policies:
        if policy.prepare:
            policy.prepare(model, {m: policy.new_class(type(m)) for m in modules[policy.name]})
    for policy in policies:
        # Modules of one class share the new one, as they shared the old one.
        new_class = functools.cache(policy.new_class)
        for module in modules[policy.name]:
            module.__class__ = new_class(type(module))  # type: ignore[arg-type]
            policy.by.begin(module)  # type: ignore[arg-type]
    return model


def _check(model: nn.Module,
           policies: list[Policy],
           lines: list[Finding],
           strict: bool) -> None:
    """
    #### Refuse policies that do not fit the model, before anything changes
    """
    names = [policy.name for policy in policies]
    expect(len({*names}) == len(names), "inject", "each policy once", names, "pass one policy, "
           "with all of its classes")
    always = {policy.name for policy in policies if policy.by.all_or_none}
    unfit = [f"{line}" for line in lines if line.problem and (strict or line.policy in always)]
    expect(not unfit, "inject", "modules that fit their policies",
           f"{'; '.join(unfit[:5])}, {len(unfit)} in all", "pass `strict=False` to leave these as "
           "they are, or leave the policy out")
    for policy in policies:
        kinds = ", ".join(str(getattr(kind, "__name__", kind)) for kind in policy.replaces)
        expect(any(line.policy == policy.name for line in lines),
               f"inject: the policy `{policy.name}`", f"modules of {kinds}",
               f"none in this {type(model).__name__}", "leave the policy out, or pass it the class "
               "that has the same forward")


def report(model: nn.Module, policies: Iterable[Policy]) -> list[Finding]:
    """
    ## What `inject` would replace, and what it would not and why

    Raises `RuntimeError` if the model is sharded.
    """
    sharded = [path for path, module in model.named_modules() if is_sharded(module)]
    expect(not sharded, "inject", "a plain model", f"`{sharded[:1]}` is sharded", "inject before "
           "`wrap`; `destroy()` gives a plain model back", RuntimeError)
    return [Finding(path, type(module).__name__, policy.name, _problem(module, policy))
            for policy in policies for path, module in model.named_modules()
            if policy.base_of(type(module))]


def restore(model: nn.Module) -> nn.Module:
    """
    ## Give all modules of a model their own classes back, with the trained weights

    * `model` is plain: what `destroy` returned, or a model that was never wrapped

    If `tensor_parallel` has split it, all ranks must call it (all-gather of each weight).

    Returns the model. Raises `RuntimeError` if it is still sharded.
    """
    report(model, ())
    for module in model.modules():
        while isinstance(module, Replacement):
            by: Any = type(module).__bases__[0]
            by.end(module)
            module.__class__ = type(module).__bases__[1]
    return model


def _problem(module: nn.Module, policy: Policy) -> str:
    """
    #### Why a policy does not fit a module, or an empty string
    """
    kind = type(module)
    if issubclass(kind, policy.by):
        return "it is replaced already"
    if getattr(kind, "all_or_none", False):
        return f"it is a {kind.__name__} already; inject both policies in one call"
    base: Any = policy.base_of(kind)
    # Methods of the replaced class, which the new forward stands for.
    methods = {name for name, value in vars(base).items()
               if callable(value)} - {"__init__"}
    owners = [(c.__name__, vars(c)) for c in kind.__mro__
              if issubclass(c, base) and c is not base
              and not issubclass(c, Replacement)]
    for owner, names in (*owners, ("this one", vars(module))):
        if other := methods & {*names}:
            return f"{owner} has a `{min(other)}` of its own"
    return policy.new_class(kind).problem(module)


def become(module: nn.Module,
           by: type[Replacement],
           **options: Any) -> None:
    """
    ## Put a replacement in front of the class of a module that no policy names

    No policy can be added to such a module later.
    """
    kind = type(module)
    module.__class__ = type(f"{by.__name__}({kind.__name__})", (by, kind),
                            {"all_or_none": True, **options})


def own_class(module: nn.Module) -> type:
    """
    ## The class that a module has without policies
    """
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, Replacement))
