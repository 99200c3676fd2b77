"""Find the best RAG configuration for your documents and questions, see why it is best, and keep improving it.

Names are loaded when they are first used: importing this package loads no model and no store. What can be imported from here
stands in `__init__.pyi`, which type checkers and editors read as well. These two files are the only ones that are not generated
from a notebook.
"""

from typing import Any

import lazy_loader

__version__ = "0.1.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_MADE_IN_BULK = ("AI4RAGChunk", "RetrievedChunk", "EvaluationData", "EvaluationResult")  # not by people


def __getattr__(name: str) -> Any:
    """Load a name; its class, where it is one, says in words which of its arguments it does not know."""
    value = _load(name)
    if name.startswith("_") or name in _MADE_IN_BULK or not isinstance(value, type):
        return value
    from .foundations.named_arguments import answering

    return answering(value)
