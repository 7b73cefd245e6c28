"""`python -m dayzero.ops.cpu`: compile the CPU kernels now, so that the first run does not have to wait."""

from dayzero.ops.cpu import load

built = load()
print(f"CPU kernels: {built.isa}" if built.available else f"no CPU kernels: {built.reason}")
