"""Find the best RAG configuration for your documents and questions, see why it is best, and keep improving it.

Names are loaded when they are first used: importing this package loads no model and no store. What can be imported from here
stands in `__init__.pyi`, which type checkers and editors read as well. These two files are the only ones that are not generated
from a notebook.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
