"""A wave: the CTAs that are resident together, with their shared and local memory, and groups of their warps."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import InvalidLanes, OutOfBounds
from cute_nvfp4.sim.frontend.codegen import NOTHING
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.frontend.special import TIMED
from cute_nvfp4.sim.machine.cluster import OFFSET_MASK, RANK_SHIFT, ClusterBarrier
from cute_nvfp4.sim.machine.engine import Engines
from cute_nvfp4.sim.machine.events import Events
from cute_nvfp4.sim.machine.global_memory import owned
from cute_nvfp4.sim.machine.launched import Run
from cute_nvfp4.sim.machine.layout import SHARED_BASE, WINDOW_SHIFT, WINDOWS
from cute_nvfp4.sim.machine.mbarrier import Mbarriers
from cute_nvfp4.sim.machine.registers import RegisterPool
from cute_nvfp4.sim.machine.special import VALUES
from cute_nvfp4.sim.machine.tensor_memory import TensorMemory

PATIENCE = 512
"""Steps after which a group that waits for its turn goes first."""


class Wave:
    """The CTAs of the given clusters of a launch, which are resident together.

    CTAs are numbered cluster by cluster, in a cluster by rank; warps are numbered CTA by CTA. Arrays are indexed by
    CTA or by warp, as their names say; ``live`` (warps, 32) marks the threads that have not exited.
    """

    def __init__(self, run: Run, clusters: np.ndarray) -> None:
        launch, self.run = run.launch, run
        places = run.clusters
        self.grid, self.block = launch.grid, launch.block
        self.threads_per_cta = self.block[0] * self.block[1] * self.block[2]
        self.warps_per_cta = -(-self.threads_per_cta // 32)
        self.cluster_size = places.size
        self.cluster_count, self.count, self.sm_count = len(clusters), len(clusters) * places.size, run.sm_count
        self.dynamic_smem = launch.dynamic_smem
        self.cluster_index = np.repeat(clusters, places.size)
        self.rank = np.tile(np.arange(places.size), len(clusters))
        self.cluster_of_cta = np.arange(self.count) // places.size
        self.cta_coordinates = places.coordinates(self.cluster_index, self.rank)
        gx, gy, _ = self.grid
        x, y, z = self.cta_coordinates
        self.cta_index = x + gx * (y + gy * z)
        self.cta_of_warp = np.repeat(np.arange(self.count), self.warps_per_cta)
        self.rank_of_warp = self.rank[self.cta_of_warp]
        self.warp_in_cta = np.tile(np.arange(self.warps_per_cta), self.count)
        lanes = self.threads_per_cta - self.warp_in_cta[:, None] * 32
        self.live = np.arange(32)[None, :] < lanes
        self.cta_alive = np.ones(self.count, bool)
        self.steps = 0
        # a cache of ``isa.matrix_scaled``: decoded fragments
        self.kept: dict = {}
        # ``effects`` counts stores, and atomics that change a value; ``progress`` counts other changes that end waits.
        self.progress = self.effects = 0
        self.shared_bytes = run.static_shared + launch.dynamic_smem
        self.shared_stride = run.shared_stride
        self.shared = owned(self.shared_stride * self.count, "shared memory")
        self.shared2d = self.shared.rows(1, 1)[1].reshape(self.count, self.shared_stride)
        self.local_bytes = run.local_bytes
        self.local = owned(self.local_bytes * 32 * len(self.cta_of_warp), "local memory")
        self._special: dict[str, np.ndarray] = {}
        self.mbarriers = Mbarriers(self)
        self.cluster_barrier = ClusterBarrier(self.cluster_of_cta[self.cta_of_warp], self.cluster_count)
        self.registers = RegisterPool(self, run.registers)
        self.copy_groups: dict = {}  # by their kind (``bulk_groups``)
        self.engines = Engines(self)
        self.tensor_memory: TensorMemory | None = None
        self.tmem: np.ndarray | None = None
        if run.kernel.uses_tensor_memory:
            self.tmem = np.zeros((self.count, 128, 512), np.uint32)
            self.tensor_memory = TensorMemory(self)
        self.events = Events(listener for client in run.clients for listener in client.listeners(self))

    def close(self) -> None:
        """Lets go of the parts that refer back to the wave, and of the listeners, which do too. So Python frees the
        memory of the wave with the last other reference to it, and the cyclic garbage collector has nothing to do."""
        self.events.closed()
        del self.mbarriers, self.registers, self.copy_groups, self.engines, self.tensor_memory, self.events

    def peer(self, cta: np.ndarray, rank: np.ndarray, where: str = "") -> np.ndarray:
        """Returns the indices of the CTAs with these ranks in the clusters of ``cta``. Raises ``OutOfBounds`` for a
        rank beyond the cluster."""
        rank = np.asarray(rank, np.int64)
        if rank.size and int(rank.max()) >= self.cluster_size:
            raise OutOfBounds(f"{where}: CTA rank {int(rank.max())} in a cluster of {self.cluster_size}")
        return self.cluster_of_cta[cta] * self.cluster_size + rank

    def resolve(self, cta: np.ndarray, address: np.ndarray, where: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Returns (CTA, shared address without rank) of .shared::cluster addresses, of 32 bits or generic, of threads
        of ``cta``. Raises ``OutOfBounds`` for other addresses."""
        if address.dtype.itemsize == 8:
            window = address >> np.uint64(WINDOW_SHIFT)
            if ((window != 0) & (window != WINDOWS["shared"])).any() or (address[window == 0] >> np.uint64(32)).any():
                raise OutOfBounds(f"{where}: {int(address.flat[0]):#x} is not an address of shared memory")
        low = address.astype(np.int64) & 0xFFFFFFFF
        return self.peer(cta, low >> RANK_SHIFT, where), low & OFFSET_MASK

    def cta_name(self, cta: int) -> str:
        """Returns the name of a CTA for messages."""
        name = f"CTA {tuple(int(c[cta]) for c in self.cta_coordinates)}"
        return name + (f" (rank {int(self.rank[cta])} of its cluster)" if self.cluster_size > 1 else "")

    @property
    def warps(self) -> int:
        return len(self.cta_of_warp)

    @property
    def changes(self) -> int:
        """The count of all changes that could end a wait."""
        return self.effects + self.progress

    def special(self, name: str) -> np.ndarray:
        """Returns the value of a special register for the whole wave (see ``special``)."""
        if name in TIMED:
            return VALUES[name](self)
        if name not in self._special:
            self._special[name] = VALUES[name](self)
        return self._special[name]

    def thread(self, warp: int, lane: int) -> str:
        """Returns the name of a thread for messages."""
        cta = int(self.cta_of_warp[warp])
        linear = int(self.warp_in_cta[warp]) * 32 + lane
        x, y, _ = self.block
        coords = tuple(int(c[cta]) for c in self.cta_coordinates)
        thread = (linear % x, linear // x % y, linear // (x * y))
        return f"CTA {coords}, thread {thread} (warp {linear // 32}, lane {lane})"


class Group:
    """Warps that are about to run the same block.

    ``warps`` (n,) are their indices in the wave. ``mask`` (n, 32) marks the lanes that belong to the group; None: all.
    ``regs`` has one array for each register, which broadcasts to (n, 32). ``age`` is the step at which the group last
    became ready, ``patience`` the steps that it waits for its turn. ``seen`` is ``Wave.changes`` when a polling loop
    last read memory, -1 outside of such a loop. ``polled`` makes the wait of the last poll of an mbarrier for a group.
    """

    __slots__ = ("_row", "age", "block", "mask", "patience", "polled", "regs", "seen", "special_cache", "warps", "wave")

    def __init__(
        self, wave: Wave, block: int, warps: np.ndarray, mask: np.ndarray | None, regs: list[np.ndarray]
    ) -> None:
        self.wave, self.block, self.warps, self.mask, self.regs = wave, block, warps, mask, regs
        self.age, self.patience, self.seen = 0, PATIENCE, -1
        self.polled: Any = None
        self.special_cache: dict[str, np.ndarray] = {}
        self._row: dict[str, np.ndarray] = {}

    @property
    def n(self) -> int:
        return len(self.warps)

    def lanes(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Returns the lanes (n, 32) of an instruction's ``mask``, where None means all lanes of the group."""
        if mask is not None:
            return np.broadcast_to(mask, (self.n, 32))
        return np.ones((self.n, 32), bool) if self.mask is None else self.mask

    def narrow(self, p: np.ndarray) -> Any:
        """Returns the mask of an instruction with guard ``p``: None for all 32 lanes of every warp, ``NOTHING`` for no
        lane, else booleans (n, 32)."""
        if p.size == 1:
            return self.mask if p.item() else NOTHING
        mask = np.broadcast_to(p, (self.n, 32)) if self.mask is None else p & self.mask
        if not mask.any():
            return NOTHING
        return None if mask.all() else mask

    def special(self, name: str) -> np.ndarray:
        if name in TIMED:
            return self.wave.special(name)
        value = self.special_cache.get(name)
        if value is None:
            value = self.wave.special(name)
            if value.shape[0] > 1 and self.n != self.wave.warps:
                value = value[self.warps]
            self.special_cache[name] = value
        return value

    def variable(self, name: str, offset: int) -> np.ndarray:
        """Returns the address of a module-scope variable, plus ``offset``."""
        return np.full((1, 1), self.wave.run.variables[name] + offset, np.uint64)

    def sure(self, value: np.ndarray, slot: int, instruction: Instruction) -> np.ndarray:
        """Returns ``value``, and announces the event ``undefined`` if register ``slot`` was never written."""
        if value is self.wave.run.zeros[slot]:
            self.wave.events.undefined(self, slot, instruction)
        return value

    def touched(self, instruction: Instruction, guard: np.ndarray | None, names: tuple[str, ...]) -> None:
        """Announces that an instruction with ``guard`` uses the registers ``names``, which a wgmma may be using."""
        mask = self.mask if guard is None else self.narrow(guard)
        if mask is not NOTHING:
            self.wave.events.registers_used(self, instruction, mask, names)

    def own_shared(self, address: np.ndarray) -> np.ndarray:
        """Adds the ranks of the group's CTAs to the shared address of a variable."""
        if self.wave.cluster_size == 1:
            return address
        ranks = (self.wave.rank_of_warp[self.warps] << RANK_SHIFT)[:, None]
        return address + ranks.astype(address.dtype)

    def goes_apart(self, branch: Instruction, taken: np.ndarray, stays: np.ndarray) -> None:
        """Raises ``InvalidLanes`` if lanes of one warp diverge at a branch with ``.uni``: some of the lanes ``taken``
        (n, 32) and some of ``stays``."""
        if "uni" in branch.mods and (apart := taken.any(axis=1) & stays.any(axis=1)).any():
            who = self.thread(taken & apart[:, None])
            raise InvalidLanes(
                f"{branch.where()}: {who} goes another way than other lanes of its warp, in spite of .uni"
            )

    def ctas(self) -> np.ndarray:
        """Returns the index of each warp's CTA, (n,)."""
        return self.wave.cta_of_warp[self.warps]

    def shared_rows(self) -> np.ndarray:
        """Returns the host address of each warp's shared memory less ``SHARED_BASE``, (n, 1)."""
        if "shared" not in self._row:
            w = self.wave
            self._row["shared"] = (w.cta_of_warp[self.warps] * w.shared_stride)[:, None] + (w.shared.base - SHARED_BASE)
        return self._row["shared"]

    def local_rows(self) -> np.ndarray:
        """Returns the host address of each thread's local memory, (n, 32)."""
        if "local" not in self._row:
            w = self.wave
            thread = self.warps[:, None] * 32 + np.arange(32)[None, :]
            self._row["local"] = w.local.base + thread * w.local_bytes
        return self._row["local"]

    def thread(self, lanes: np.ndarray | None = None) -> str:
        """Returns the name of the first thread of ``lanes`` (n, 32), or of the group, for messages."""
        row, lane = np.argwhere(self.lanes(lanes))[0]
        return self.wave.thread(int(self.warps[row]), int(lane))

    def some(self, select: np.ndarray, live: list[int]) -> Group:
        """Returns the group of the warps ``select`` (indices in this group) with their lanes of this group and the
        registers whose slots are ``live``."""
        return self.rows(select, None if self.mask is None else self.mask[select], self.block, live)

    def rows(self, select: np.ndarray, mask: np.ndarray | None, block: int, live: list[int]) -> Group:
        """Returns the group of the warps ``select`` with other lanes, at another block (see ``some``)."""
        whole = len(select) == self.n
        regs = list(self.wave.run.zeros)
        for slot in live:
            value = self.regs[slot]
            regs[slot] = value if whole or value.shape[0] == 1 else value[select]
        if mask is not None and mask.all():
            mask = None
        part = Group(self.wave, block, self.warps if whole else self.warps[select], mask, regs)
        part.age, part.patience, part.seen = self.age, self.patience, self.seen
        return part
