"""A mypy plugin: attributes that ``nn.Module`` finds at run time have type Any.

torch declares them ``Tensor | Module``, so ``module.kernel_size[0]`` or ``len(module.stride)`` on a layer of unknown class
is an error. With this, mypy's checks can all stay on in code that handles modules of any class.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny, UnionType, get_proper_type

MODULE = "torch.nn.modules.module.Module"


class TorchPlugin(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        return found_at_run_time if owner == MODULE and not name.startswith("__") else None


def found_at_run_time(context: AttributeContext) -> Type:
    declared = get_proper_type(context.default_attr_type)
    return AnyType(TypeOfAny.explicit) if isinstance(declared, UnionType) and str(declared).endswith(MODULE) else declared


def plugin(version: str) -> type[Plugin]:
    return TorchPlugin
