"""The same engines in one process: compress a context, ask many questions, any tier."""

from criticalkv.services.local.engine import LocalEngine, LocalNode, LocalTurn

__all__ = ["LocalEngine", "LocalNode", "LocalTurn"]
