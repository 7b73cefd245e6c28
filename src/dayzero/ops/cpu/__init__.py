"""CPU kernels as PyTorch operators (`torch.ops.dayzero`), compiled on first use by `load()`. Their schemas are in state.cpp."""

from .build import KernelBuild, load

__all__ = ["KernelBuild", "load"]
