
import cutlass, cutlass.cute as cute
from cutlass import Uint32
from cutlass.cute.nvgpu import warpgroup
from cute_nvfp4.kernels.gemm.sm90 import wgmma
from cute_nvfp4.kernels.gemm.sm90.wgmma import *
class NoDecode(WgmmaGemm):
    def decode(self, fragment, packed):
        words = cute.make_tensor(cute.recast_ptr(fragment.iterator, dtype=Uint32), cute.make_layout((4, STEPS)))
        for step in range(STEPS):
            for i in range(4):
                words[i, step] = packed.codes[step] if i % 2 else packed.scales[step // 2]
