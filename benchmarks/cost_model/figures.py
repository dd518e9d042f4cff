"""What the Trainium2 documentation says, each figure with its page and section; pages of the Neuron SDK's nki folder.

A figure that a page states for NeuronCore-v2 only is used for v3 where the Trainium2 guide states no other; its
source says so.
"""

import dataclasses
import itertools
import math


@dataclasses.dataclass(frozen=True)
class Figure:
    """A documented number. source: page (without folders) and section."""

    value: float
    unit: str
    source: str


_DMA = "nki-dma-overview.rst"
_BANDWIDTH = "nki-dma-bandwidth-guide.rst"
_TRN2 = "trainium2_arch.rst"
_INF2 = "trainium_inferentia2_arch.rst"
_PERF = "nki_perf_guide.rst"

DMA_ENGINES = Figure(16, "engines", f"{_BANDWIDTH}, Why Large Contiguous DMA Payloads Are Required, table, TRN2")
PARTITIONS_PER_DMA_ENGINE = Figure(
    8, "partitions", f"{_DMA}, Performance Considerations: 128 partitions / 16 DMA engines"
)
DMA_BYTES_PER_NS = Figure(23, "B/ns/engine", f"{_BANDWIDTH}, same table; {_DMA}, Performance Considerations, table")
DMA_THEORETICAL_BYTES_PER_NS = Figure(27.2, "B/ns/engine", f"{_DMA}, Basic DMA Capabilities (NeuronCore-v3)")
DMA_FIXED_NS = Figure(
    1300, "ns", f"{_BANDWIDTH}, Why Large Contiguous DMA Payloads Are Required: semaphore-to-start latency"
)

# Bytes of one contiguous run -> throughput as a share of the rightmost point's, read off the figure "DMA Throughput
# varying Bytes per Partition for p_dim = 128" of nki-dma-overview.rst, Performance Considerations. Its y axis has no
# numbers: that the rightmost point is DMA_BYTES_PER_NS on every engine is this model's reading. It is a figure of
# DMAs in flight together, since one DMA of 128 x 2 KiB with DMA_FIXED_NS in front would stay below 40 %, where the
# figure has 81 %.
DMA_EFFICIENCY = {
    32: 0.014,
    64: 0.026,
    128: 0.05,
    256: 0.103,
    512: 0.206,
    1024: 0.422,
    2048: 0.813,
    4096: 0.966,
    8192: 0.983,
    16384: 0.990,
    32768: 1.0,
}

HWDGE_NS = Figure(600, "ns/DMA", f"nki-dge.rst, DGE Modes, hwdge; {_TRN2}, Descriptor Generation Engine (DGE)")
HWDGE_INSTANCES = Figure(2, "instances", f"{_TRN2}, Descriptor Generation Engine (DGE)")

TENSOR_GHZ = Figure(2.4, "GHz", f"{_TRN2}, NeuronCore-v3 Compute Engine Updates, table")
VECTOR_GHZ = Figure(0.96, "GHz", f"{_TRN2}, same table")
SCALAR_GHZ = Figure(1.2, "GHz", f"{_TRN2}, same table")
GPSIMD_GHZ = Figure(1.2, "GHz", f"{_TRN2}, same table")

# MultiplyMoving is issued every max(N, this) cycles, N the moving columns.
MATMUL_LEAST_CYCLES = Figure(64, "cycles", f"{_INF2}, Tensor Engine, Cost Model: MM_INIT_LATENCY on NeuronCore-v2")
MATMUL_FP32_FACTOR = Figure(4, "x", f"{_INF2}, Tensor Engine, Cost Model: FP32 input is roughly 4x higher")
TRANSPOSE_FP32_SPEEDUP = Figure(2, "x", f"{_TRN2}, Built-in Transpose Support: 2x speedup in FP32 transpose")
# LoadStationary of 128 columns takes 128 / 4 cycles, behind the MultiplyMoving before it (Background LoadStationary, _INF2).
STATIONARY_COLUMNS_PER_CYCLE = Figure(4, "columns/cycle", f"{_PERF}, Opt #7: LS_II ~= 128/4 = 32 cycles")

ACCESS_CYCLES = Figure(60, "cycles", f"{_INF2}, Tensor access overhead: approximately 60 cycles on NeuronCore-v2")
DEPENDENT_CYCLES = Figure(
    100, "cycles", f"{_INF2}, Vector Engine, Cost Model: static overhead where one depends on the last"
)
TWO_TILES_FACTOR = Figure(2, "x", f"{_INF2}, Vector Engine, Cost Model: two input tiles take roughly 2N cycles")
WIDE_STRIDE_BYTES = Figure(16, "bytes", f"{_INF2}, Access pattern: above this innermost stride, half the bandwidth")
READ_ACCUMULATOR_CYCLES = Figure(64, "cycles", f"{_INF2}, Scalar Engine: ActReadAccumulator, on NeuronCore-v2")
PERFORMANCE_MODE = Figure(
    4, "x", f"{_TRN2}, Vector Engine Performance Mode, list 1: BF16/FP16, both in SBUF, contiguous"
)
PERFORMANCE_MODE_HALF = Figure(
    2, "x", f"{_TRN2}, Vector Engine Performance Mode, list 2: one condition less, tensor_tensor"
)

SBUF_PARTITION_BYTES = Figure(224 * 1024, "bytes", f"{_TRN2}, NeuronCore-v3 Compute Engine Updates")
PSUM_PARTITION_BYTES = Figure(16 * 1024, "bytes", f"{_INF2}, NeuronCore-v2; {_TRN2}: capacity remains the same")


def dma_efficiency(run_bytes):
    """Share of the peak throughput for contiguous runs of `run_bytes`, between the figure's points along log2 of the bytes.

    Below the first point the time of a run stays that of the first point.
    """
    points = list(DMA_EFFICIENCY.items())
    if run_bytes <= points[0][0]:
        return points[0][1] * run_bytes / points[0][0]
    for (low, low_share), (high, high_share) in itertools.pairwise(points):
        if run_bytes <= high:
            return low_share + (high_share - low_share) * math.log2(run_bytes / low) / math.log2(high / low)
    return points[-1][1]
