"""Rich displays for notebooks: layouts, pipelines, memory, time lines, counters, hazards and kernels as SVG and HTML.

Nothing here needs more than the standard library and numpy; a picture's module is imported when something is drawn.
"""

from __future__ import annotations

from ..lazy import lazy_names

_PUBLIC = {"Picture": "svg", "register": "registered", "show": "showing"}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
