"""Rich displays for notebooks: layouts, pipelines, memory, time lines, counters, hazards and kernels as SVG and HTML.

Drawing needs only the standard library and numpy. The module of a drawing is imported when something is drawn.
"""

from __future__ import annotations

from ..lazy import lazy_names

_PUBLIC = {"Picture": "svg", "register": "registered", "show": "showing"}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
