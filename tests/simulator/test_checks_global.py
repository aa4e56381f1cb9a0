"""Global memory that threads of many clusters access: each cluster has its own clocks."""

from __future__ import annotations

import pytest
from test_checks import go

from cute_nvfp4.sim import Race


@pytest.mark.parametrize("sync", ["bar.warp.sync -1;", "bar.sync 0;"])
@pytest.mark.parametrize("writer", range(3))
def test_one_word_that_clusters_read_together(writer: int, sync: str) -> None:
    """Equal threads of three CTAs read the word; one of them stores it. What orders its own read orders no other."""
    body = f"setp.eq.and.u32 %q4, %r17, {writer}, %q1; {{}} ld.global.b32 %r12, [%p0]; {sync}"
    body += "@%q4 st.global.b32 [%p0], 5;"
    go(body.format("@%q4"), grid=(3, 1, 1))
    with pytest.raises(Race, match="is read by another cluster"):
        go(body.format(""), grid=(3, 1, 1))
